"""Drafter checkpoints on disk: a folder with `config.json` and `model.safetensors`.

The names are those of the published DFlash checkpoints (arXiv 2602.06036). Reading accepts the
prefixes that other tools add; writing gives the plain names.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from blockdraft.core.errors import ModelError
from blockdraft.core.files import read_json, replace_file
from blockdraft.hub.folder import INDEX_NAME, read_index

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
PROVENANCE_NAME = "provenance.json"

_PREFIXES = ("draft_model.", "model.", "logit_head.")
_RENAMED = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    # AngelSpec's.
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    # Modules of their own in some trainers.
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}

_OF_METHODS = {
    "attention_conv.": "DFlash 2",
    "mlp_conv.": "DFlash 2",
    "candidate_selector.": "DFlash 2",
    "markov_head.": "DSpark",
    "confidence_head.": "DSpark",
    "prefix_gru.": "Domino",
    "embed_proj.": "Domino",
    "hidden_correction.": "DFly",
    "self_attn.k_proj_target.": "DFlare",
    "self_attn.v_proj_target.": "DFlare",
    "layer_fusion_weights": "DFly or DFlare",
}
"""Parts of tensor names that only drafters of one method have."""

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Of weights. Others come with scales, which are no part of a drafter in the published layout."""

_NUM_SHOWN = 3


def read_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a checkpoint.

    Raises:
        ModelError: it is absent or not a JSON object.
    """
    path = folder / CONFIG_NAME
    try:
        raw = read_json(path)
    except OSError as error:
        raise ModelError(
            f"cannot read {path} ({error.strerror}); a drafter is a folder with {CONFIG_NAME} and "
            f"{WEIGHTS_NAME}"
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{path} is not valid JSON ({error}); copy the checkpoint again"
        ) from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} is not a JSON object; copy the checkpoint again")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint on the CPU, under their plain names; shards are joined.

    Raises:
        ModelError: the file is absent or damaged, or two tensors have the same plain name.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            part = load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {path} ({error}); copy the checkpoint again") from error
        for name, value in part.items():
            plain = plain_name(name)
            if plain in tensors:
                raise ModelError(f"{path} holds {plain} twice; it is not one drafter's checkpoint")
            tensors[plain] = value
    return tensors


def load_copies(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> Callable[[Tensor | None], Tensor | None]:
    """Give a model copies of the tensors of its checkpoint; returns what copies others like them.

    Nothing is left mapped to a file that a trainer may replace. dtype: None keeps that of `fc`.
    """
    wanted = dtype or tensors["fc.weight"].dtype

    def placed(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.to(device=device, dtype=wanted, copy=True)

    model.load_state_dict({name: placed(value) for name, value in tensors.items()}, assign=True)
    return placed


def plain_name(name: str) -> str:
    """The published name of a tensor, without what other tools put before it."""
    while any(name.startswith(prefix) for prefix in _PREFIXES):
        name = name.split(".", 1)[1]
    for theirs, ours in _RENAMED.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def check_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], folder: Path
) -> None:
    """Compare names and shapes with those of the model that the config describes.

    Raises:
        ModelError: they differ; says how many tensors are missing, unexpected and of a wrong
            shape, and names the first few. Or one holds no numbers that a drafter can use.
    """
    extra = sorted(found.keys() - expected.keys())
    for name in extra:
        for part, method in _OF_METHODS.items():
            if name.startswith(part) or f".{part}" in name:
                raise ModelError(
                    f"{folder} holds {name}: it is a {method} drafter, and its {CONFIG_NAME} "
                    f"describes another; use the two files of one checkpoint"
                )
    shapes = [
        f"{name} {list(found[name].shape)} instead of {list(expected[name].shape)}"
        for name in sorted(found.keys() & expected.keys())
        if found[name].shape != expected[name].shape
    ]
    problems = [
        *_count("missing", sorted(expected.keys() - found.keys())),
        *_count("unexpected", extra),
        *_count("of the wrong shape", shapes),
    ]
    if problems:
        raise ModelError(
            f"the tensors in {folder} are not those of its {CONFIG_NAME}: {'; '.join(problems)}; "
            f"use the two files of one checkpoint"
        )
    for name in sorted(found):
        if (reason := _unusable(found[name])) is not None:
            raise ModelError(f"{name} in {folder} {reason}")


def _unusable(value: Tensor) -> str | None:
    """What is wrong with the numbers of a weight, and the remedy."""
    if value.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        return f"is of type {value.dtype}; use a checkpoint in one of {names}"
    # A sum is quick; one that overflows does not say that its numbers did.
    if value.sum(dtype=torch.float32).isfinite() or value.isfinite().all():
        return None
    return "holds values that are not finite; copy the checkpoint again"


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint; each file replaces its predecessor in one move.

    The weights come first: a reader that finds a config finds its weights too.

    Args:
        folder: made if it does not exist.
        config: content of `config.json`.
        tensors: by published name, on any device.
        provenance: content of `provenance.json`; None writes none and leaves an old one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_cpu = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    replace_file(folder / WEIGHTS_NAME, lambda path: save_file(on_cpu, path, {"format": "pt"}))
    write_index(folder)
    replace_file(folder / CONFIG_NAME, _json_writer(config))
    if provenance is not None:
        write_provenance(folder, provenance)


def write_index(folder: Path) -> None:
    """Say in an index that the drafter's tensors are those of its one file of weights.

    Tables of n-grams and Hydra heads lie beside it. vLLM reads all files that no index leaves out.
    """
    weights = folder / WEIGHTS_NAME
    with weights.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    names = sorted(json.loads(header).keys() - {"__metadata__"})
    content = {
        # The format leaves no holes: all that is not header are numbers.
        "metadata": {"total_size": weights.stat().st_size - 8 - len(header)},
        "weight_map": dict.fromkeys(names, WEIGHTS_NAME),
    }
    replace_file(folder / INDEX_NAME, _json_writer(content))


def unlisted_files(folder: Path) -> list[str]:
    """Files of tensors beside a drafter's weights, where no index tells them apart."""
    if (folder / INDEX_NAME).exists():
        return []
    return sorted(own.name for own in folder.glob("*.safetensors") if own.name != WEIGHTS_NAME)


def read_provenance(folder: Path) -> dict[str, Any]:
    """What the trainer wrote of how a drafter was made; empty if nothing is known.

    Raises:
        ModelError: the file is damaged.
    """
    path = folder / PROVENANCE_NAME
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path} ({error}); copy it again, or delete it") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; copy it again, or delete it")
    return content


def write_provenance(folder: Path, content: Mapping[str, Any]) -> None:
    """Replace what `read_provenance` reads, in one move."""
    replace_file(folder / PROVENANCE_NAME, _json_writer(content))


def _weight_files(folder: Path) -> Iterable[Path]:
    """The one file of weights, or the shards that an index names."""
    single, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if single.exists() or not index.exists():
        return [single]
    try:
        names = set(read_index(index).values())
    except (OSError, ValueError) as error:
        raise ModelError(f"{index} is damaged ({error}); copy the checkpoint again") from error
    return [folder / name for name in sorted(names)]


def _count(what: str, names: list[str]) -> list[str]:
    """`["12 missing (a, b, c, ...)"]`, or nothing."""
    if not names:
        return []
    more = ", ..." if len(names) > _NUM_SHOWN else ""
    return [f"{len(names)} {what} ({', '.join(names[:_NUM_SHOWN])}{more})"]


def _json_writer(content: Mapping[str, Any]) -> Callable[[Path], object]:
    text = json.dumps(dict(content), indent=1) + "\n"
    return lambda path: path.write_text(text, encoding="utf-8")
