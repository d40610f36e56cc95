"""A second device that computes on the CPU: tensors of two devices do not mix there.

Tensors on it say that they lie on torch's device "meta", and hold numbers nevertheless.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

SECOND = torch.device("meta")
aten = torch.ops.aten
MIXED = (aten._to_copy, aten.to, aten.copy_, aten.index, aten.index_put_)
"""Copies, and what takes indices of the CPU on every device."""
_CPU = torch.device("cpu")


class _Elsewhere(Tensor):
    """A tensor on the second device, and the one on the CPU that it stands for."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "_Elsewhere":
        found: _Elsewhere = Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=SECOND
        )
        found.held = held
        return found

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


def _run(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation where its tensors lie; factories and copies go where they are told to."""
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    elsewhere = [isinstance(tensor, _Elsewhere) for tensor in tensors]
    may_mix = function.overloadpacket in MIXED
    # Numbers without dimensions mix with every device, as a card's do.
    mixed = any(t.ndim for t, there in zip(tensors, elsewhere, strict=True) if not there)
    if any(elsewhere) and mixed and not may_mix:
        raise RuntimeError(f"{function} mixes tensors of two devices")
    places = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.device)]
    goes_there = places[0] == SECOND if places else any(elsewhere)
    plain_args, plain_kwargs = tree_map(_held, (tuple(args), dict(kwargs)))
    found = function(*plain_args, **plain_kwargs)
    written = [(_held(leaf), leaf) for leaf in tree_iter((args, kwargs))]

    def placed(output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        for own, leaf in written:  # what is written in place stays the very tensor
            if own is output and isinstance(leaf, _Elsewhere) == goes_there:
                return leaf
        return _Elsewhere(output) if goes_there else output

    return tree_map(placed, found)


def _held(value: Any) -> Any:
    if isinstance(value, torch.device):
        return _CPU
    return value.held if isinstance(value, _Elsewhere) else value


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(function, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """What copies numbers in or out below all operations."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.tensor and torch.device(kwargs.get("device") or "cpu") == SECOND:
            return function(*args, **kwargs | {"device": _CPU}).to(SECOND)
        if function is Tensor.tolist:
            args = [_held(args[0])]
        return function(*args, **kwargs)


@contextmanager
def second_device() -> Iterator[None]:
    """There is a second device inside."""
    with _Operations(), _Literals():
        yield


@torch.inference_mode()
def move(module: nn.Module) -> None:
    """Move a module's weights there."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(_Elsewhere(parameter.detach()), requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part.register_buffer(name, _Elsewhere(buffer))
