"""Models whose decoder layers lie on several devices.

All but the layers lies on one device, the main one: the embedding and the head, which the drafter
shares, the final norm, and rotations. A layer elsewhere is called with what it is given moved to
it, and what comes out of the last one goes back. So only layers and their keys and values know of
other devices; inputs, logits, features and the drafter have one place.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.errors import ModelError
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.paged_support import NotPaged


def spread(model: PreTrainedModel) -> str:
    """Run a model that transformers placed by a `device_map` without a library's hooks, for good.

    Returns:
        the main device.

    Raises:
        ModelError: the devices have no room for it all.
    """
    if left_out := _offloaded(getattr(model, "hf_device_map", {})):
        raise ModelError(
            f"device_map leaves {left_out[0]} and {len(left_out) - 1} more parts of "
            f"{type(model).__name__} in no device's memory, and offloaded parts are not supported; "
            "use more devices, or a smaller target"
        )
    # Here, as training and plain serving need no such package.
    from accelerate.hooks import remove_hook_from_submodules  # type: ignore[import-untyped]

    remove_hook_from_submodules(model)
    for module in model.modules():
        # It leaves the module's own forward behind, as if somebody had replaced it.
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward
    main = model.get_input_embeddings().weight.device
    layers = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    for module in set(model.modules()) - inside:
        module._apply(lambda tensor: tensor.to(main), recurse=False)
    for layer in layers:
        layer.to(next(layer.parameters()).device)
        # Also on the main device: what comes to it may lie where the layer before does.
        layer.register_forward_pre_hook(_to_layer, with_kwargs=True)
    layers[-1].register_forward_hook(_to_model(main))
    return str(main)


def _offloaded(device_map: Mapping[str, object]) -> list[str]:
    """The parts that accelerate would fetch for each call: from the CPU only to other devices."""
    at_rest = {"disk"} if {*device_map.values()} <= {"cpu", "disk"} else {"cpu", "disk"}
    return [name for name, place in device_map.items() if str(place) in at_rest]


def layer_devices(model: PreTrainedModel, num_pools: int) -> list[torch.device]:
    """Where the keys and values of each pool lie: those of a layer where it lies.

    A model has more pools than layers where each attends twice; then all lies on one device.

    Raises:
        NotPaged: it does not.
    """
    own = [next(layer.parameters()).device for layer in decoder_layers(model)]
    if len(own) == num_pools:
        return own
    if {*own} != {model.device}:
        raise NotPaged("its layers lie on several devices and attend twice")
    return [model.device] * num_pools


def _to_layer(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    device = next(layer.parameters()).device
    return _moved(args, device), {name: _moved(given, device) for name, given in kwargs.items()}


def _to_model(main: torch.device) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(layer: nn.Module, args: Any, output: Any) -> Any:
        return _moved(output, main)

    return hook


def _moved(given: Any, device: torch.device) -> Any:
    """Tensors, also those in a tuple, on a device.

    Lists and dictionaries stay: layers may write to them.
    """
    if isinstance(given, Tensor):
        return given.to(device)
    return tuple(_moved(part, device) for part in given) if type(given) is tuple else given
