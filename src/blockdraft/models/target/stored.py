"""Checkpoints that transformers would read as another model, without an error.

It unpacks fp8 and compressed-tensors at load where no kernel multiplies with packed weights.
"""

from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_NAME

from blockdraft.hub.folder import INDEX_NAME, read_index
from blockdraft.models.layers.experts import stacked_experts
from blockdraft.models.supported import quantization_of, quantized_by

_FORM = ("num_bits", "type", "strategy", "symmetric", "group_size", "block_structure")
"""What says how weights of compressed-tensors are packed."""


def check_scheme(config: PretrainedConfig) -> None:
    """Refuse a scheme of which transformers would follow a part only.

    Raises:
        ValueError: says which part.
    """
    found = quantization_of(config)
    if quantized_by(config) != "compressed-tensors":
        return
    if found.get("transform_config"):
        raise ValueError("transformers leaves out its transform_config")
    groups = found.get("config_groups") or {}
    # The last two are the same.
    ordered = (True, "group", "dynamic")
    if any(_weights(group).get("actorder") in ordered for group in groups.values()):
        raise ValueError("transformers leaves out the order of its groups (actorder)")
    for what, are_experts in (("all experts", True), ("all other layers", False)):
        forms = {
            _form(name, group, found)
            for name, group in groups.items()
            if _names_experts(group) == are_experts and _packs(group)
        }
        if len(forms) > 1:
            raise ValueError(f"transformers unpacks {what} in one way, and they have several")


def check_unpacked(folder: Path, config: PretrainedConfig, model: nn.Module) -> None:
    """Refuse weights that were unpacked without all of their scales, or with those of others.

    Raises:
        ValueError: names one.
    """
    tensors, method = dict(_tensors(folder)), quantized_by(config)
    if not tensors:
        raise ValueError("its scales cannot be checked, since no safetensors file holds them")
    if method == "fp8":
        _check_eight_bits(tensors, quantization_of(config).get("weight_block_size"))
    elif method == "compressed-tensors" and stacked_experts(model):
        for name in tensors:
            if ".experts." in name and name.endswith("weight_global_scale"):
                raise ValueError(f"transformers leaves out {name}")


def whole_number(folder: Path, unused: Set[str], model: nn.Module) -> str | None:
    """A parameter that is stored in whole numbers, which transformers would take as such.

    unused: tensors that the model has no place for. transformers renames some weights, and joins
    those of experts, so a name may be none of the model's.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for name, (kind, _) in _tensors(folder):
        if not kind.startswith(("I", "U", "BOOL")) or name in unused or name in buffers:
            continue
        own = parameters.get(name)
        if name.endswith(".weight") if own is None else own.is_floating_point():
            return name
    return None


def unused_bias(folder: Path, names: Iterable[str], model: nn.Module) -> str | None:
    """Of tensors that the model has no place for, one that would be added to what it computes.

    Zeros add nothing: some tools write them for all linear layers.
    """
    modules = dict(model.named_modules())
    for name in sorted(names):
        module, _, part = name.rpartition(".")
        own = modules.get(module)
        has_weight = isinstance(getattr(own, "weight", None), nn.Parameter)
        if part == "bias" and has_weight and getattr(own, "bias", None) is None:
            for path in _files(folder):
                with safe_open(path, "pt") as file:
                    if name in file.keys() and file.get_tensor(name).any():  # noqa: SIM118
                        return name
    return None


def _form(name: str, group: Any, config: Mapping[str, Any]) -> tuple[str, ...]:
    if not (weights := _weights(group)):  # a name that stands for all of it
        return (name,)
    own = group.get("format") or config.get("format")
    return (str(own), *(str(weights.get(key)) for key in _FORM))


def _weights(group: Any) -> Mapping[str, Any]:
    return (group.get("weights") or {}) if isinstance(group, Mapping) else {}


def _packs(group: Any) -> bool:
    """False for one that rounds activations alone."""
    return not isinstance(group, Mapping) or bool(_weights(group))


def _names_experts(group: Any) -> bool:
    """As transformers tells them apart."""
    targets = group.get("targets") if isinstance(group, Mapping) else group
    return any(target.startswith("re:") and "experts" in target for target in targets or ())


def _files(folder: Path) -> list[Path]:
    """What transformers reads; some folders hold all weights in another form too.

    None where it reads `pytorch_model.bin`.
    """
    if (whole := folder / SAFE_WEIGHTS_NAME).is_file():
        return [whole]
    index = folder / INDEX_NAME
    if not index.is_file():
        return []
    return [folder / name for name in sorted({*read_index(index).values()})]


def _tensors(folder: Path) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """The type and the shape of each stored tensor, by its name."""
    for path in _files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                held = file.get_slice(name)
                yield name, (held.get_dtype(), held.get_shape())


def _check_eight_bits(
    tensors: Mapping[str, tuple[str, list[int]]], block: list[int] | None
) -> None:
    modules = {name.rpartition(".")[0] for name in tensors if "scale" in name.rpartition(".")[2]}
    for name, (kind, shape) in tensors.items():
        if kind.startswith("F8_") and "scale" not in name.rpartition(".")[2]:
            module = name.rpartition(".")[0]
            if module not in modules:
                raise ValueError(f"{name} has no scales")
            names = (f"{name}_scale_inv", f"{module}.scale", f"{module}.qscale_weight")
            scales = next((tensors[own][1] for own in names if own in tensors), [])
            if block is not None and _is_cut(shape, scales, block):
                raise ValueError(
                    f"{name} is {shape}, no multiple of its blocks {block}, and transformers would "
                    "divide it evenly"
                )


def _is_cut(shape: list[int], scales: list[int], block: list[int]) -> bool:
    """Whether the last of several blocks, in either direction, is smaller than the others."""
    sizes = zip(shape[-2:], scales[-2:], block, strict=False)
    return len(scales) >= 2 and any(
        num == -(-size // own) > 1 and size % own for size, num, own in sizes
    )
