"""Operations that wait for a device, found before they would break the capture of a CUDA graph.

A capture that fails cannot be undone: in torch 2.11 the allocator takes it to be under way for
good, and gives no memory back any more.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

aten = torch.ops.aten
READS = (aten._local_scalar_dense, aten.is_nonzero, aten.equal)
"""What gives Python a number of a tensor."""
SIZES = (aten.nonzero, aten.masked_select, aten.bincount, aten._unique2, aten.repeat_interleave)
"""What gives a tensor whose size or whose numbers the host must know first."""
COPIES = (aten._to_copy, aten.copy_)


class Waits(RuntimeError):
    """An operation waits for the device."""


class RefuseWaits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, an operation on tensors of a device that the host waits for raises `Waits`.

    Only those of this thread. Not every such operation is known here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kind = device.type

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # In inference mode, and only there, operations arrive that are made of others, such as
        # `item`: the others are what is known here.
        with self:
            found = function.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._waits(function.overloadpacket, args, tensors):
            raise Waits(f"{function} waits for the device")
        result = function(*args, **kwargs)
        if function.overloadpacket in COPIES and self._crosses([*tensors[-1:], result]):
            raise Waits(f"{function} copies between host and device")
        return result

    def _waits(self, function: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> bool:
        if not any(tensor.device.type == self._kind for tensor in tensors):
            return False
        # New numbers of the host are lifted last, when they are on the device already.
        if function in (*READS, *SIZES, aten.lift_fresh):
            return True
        is_mask = (own is not None and own.dtype == torch.bool for own in _indices(function, args))
        return any(is_mask)

    def _crosses(self, tensors: Iterable[Tensor]) -> bool:
        are_there = {tensor.device.type == self._kind for tensor in tensors}
        return len(are_there) > 1


def _indices(function: Any, args: Sequence[Any]) -> Iterable[Tensor | None]:
    """A mask among them is turned into numbers on the host."""
    return args[1] if function is aten.index else ()
