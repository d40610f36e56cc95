"""Linear layers of models that compute from packed copies of their weights, where a backend packs.

The order in which weights lie there never leaves the process. The packed copy takes as much memory
as the weights; those stay where they are, for whoever holds the model, unless nobody does.
A packed layer cannot be trained. The head, which the drafter takes from the target, is packed once
for both.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TypeVar
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Linear
from blockdraft.kernels.weights import GroupWeight, Int8Weight, joined_groups
from blockdraft.models.layers.quantized import QuantizedLinear, is_linear, weight_of
from blockdraft.models.layers.tensors import joined

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class PackedLinear:
    """Calls like the linear layer of `weight` [outputs, inputs] and `bias` [outputs].

    in_int8: or like one of the closest weight in int8.
    """

    def __init__(
        self, weight: Tensor | GroupWeight, bias: Tensor | None = None, *, in_int8: bool = False
    ) -> None:
        self.linear = _linear(weight, bias, in_int8)
        self.has_bias = bias is not None
        self._source = ref(_held(weight)), _version(_held(weight))

    def is_of(self, weight: Tensor | GroupWeight) -> bool:
        """True if this very weight was packed, and was not changed in place since."""
        packed, version = self._source
        held = _held(weight)
        return packed() is held and version is not None and version == _version(held)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return self.linear(x)


_packed: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
"""Packed layers without bias that somebody holds, by the address of their weight."""


def side_by_side(*linears: nn.Linear, in_int8: bool = False) -> Linear:
    """One layer with the outputs of several, one after another; see PackedLinear."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    bias = joined(biases) if biases else None
    weights = [weight_of(linear) for linear in linears]
    plain = [weight for weight in weights if isinstance(weight, Tensor)]
    grouped = [weight for weight in weights if isinstance(weight, GroupWeight)]
    if len(linears) not in (len(plain), len(grouped)):
        raise TypeError("weights of several kinds do not lie side by side")
    return _linear(joined(plain) if plain else joined_groups(grouped), bias, in_int8)


def _linear(weight: Tensor | GroupWeight, bias: Tensor | None, in_int8: bool) -> Linear:
    backend = backend_for(weight.dtype, weight.device)
    if in_int8 and isinstance(weight, Tensor):
        return backend.linear(Int8Weight.of(weight), bias)
    return backend.linear(weight, bias)


def _held(weight: Tensor | GroupWeight) -> Tensor:
    """What lies in memory."""
    return weight.numbers if isinstance(weight, GroupWeight) else weight


def can_pack(weight: Tensor) -> bool:
    """True for a weight that this machine packs, and then multiplies well."""
    return backend_for(weight.dtype, weight.device).packs


def can_pack_linear(linear: nn.Linear) -> bool:
    """True for a layer whose weight this machine packs, and then multiplies well."""
    if isinstance(linear, QuantizedLinear):
        return backend_for(linear.weight.dtype, linear.weight.device).multiplies_groups
    return can_pack(linear.weight)


def multiplies_int8(dtype: torch.dtype, device: torch.device | str) -> bool:
    """True if this machine multiplies with weights in int8 faster than with those in `dtype`."""
    return backend_for(dtype, device).multiplies_int8


def linear_of(weight: Tensor | GroupWeight, *, in_int8: bool = False) -> Callable[[Tensor], Tensor]:
    """The product with a weight [outputs, inputs], packed where that helps; see PackedLinear.

    Shares the packed copy of a layer without bias that has this very weight. One in groups stays
    what it is.
    """
    if isinstance(weight, Tensor) and (in_int8 or not can_pack(weight)):
        return _linear(weight, None, in_int8)
    known = _packed.get(_held(weight).data_ptr())
    if known is not None and known.is_of(weight):
        return known
    return PackedLinear(weight)


def rows_of(weight: Tensor | GroupWeight, outputs: Tensor) -> Tensor | GroupWeight:
    """The weight of some outputs."""
    return weight.detach()[outputs] if isinstance(weight, Tensor) else weight.at(outputs)


def _version(weight: Tensor) -> int | None:
    """Another one after every change in place; None for a tensor of inference mode: not counted."""
    return None if weight.is_inference() else weight._version


def plain_linears(module: nn.Module) -> list[nn.Linear]:
    """Its linear layers that are nothing more: no subclass, and plain."""
    return [
        child
        for child in module.modules()
        if isinstance(child, nn.Linear) and is_linear(child) and is_plain(child)
    ]


def is_plain(module: nn.Module) -> bool:
    """True if a call runs the forward of the module's class and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks)


def pack_linears(linears: Iterable[nn.Linear], *, in_int8: bool = False) -> ExitStack:
    """Let linear layers compute from packed copies of their weights; closing undoes it."""
    undo = ExitStack()
    for linear in linears:
        if in_int8 or can_pack_linear(linear):
            weight = weight_of(linear)
            packed = PackedLinear(weight, linear.bias, in_int8=in_int8)
            if not packed.has_bias and not in_int8:
                _packed[_held(weight).data_ptr()] = packed
            replace_forward(linear, packed, undo)
    return undo


def drop_weights(module: nn.Module) -> None:
    """Free the weights of a module's linear layers, all of which others compute from copies of.

    They keep their shape and type, for whoever counts; every number reads as "not a number", so
    that a use which was forgotten does not go unnoticed.
    """
    with torch.inference_mode(False):
        for child in module.modules():
            if isinstance(child, QuantizedLinear):
                child.quantized = None
            elif isinstance(child, nn.Linear):
                nothing = child.weight.new_full((), torch.nan)
                child.weight.data = nothing.expand(child.weight.shape)


def replace_forward(module: nn.Module, forward: Callable[..., Tensor], undo: ExitStack) -> None:
    """Let a module call another forward, its hooks around it, until `undo` is closed."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    if own is None:
        undo.callback(vars(module).pop, "forward")
    else:
        undo.callback(vars(module).__setitem__, "forward", own)


def packed_copy(
    module: AnyModule,
    linears: Callable[[AnyModule], Iterable[nn.Linear]] = plain_linears,
    *,
    in_int8: bool = False,
) -> AnyModule:
    """A twin for inference with the same parameters, and packed linear layers, or some of them.

    The module itself is not touched and can be trained on; the twin follows in part only (its
    packed weights are copies, the others are shared), so make a new one then.
    """
    shared = [*module.parameters(), *module.buffers()]
    twin = copy.deepcopy(module, {id(tensor): tensor for tensor in shared})
    pack_linears(linears(twin), in_int8=in_int8)
    return twin
