"""Products whose memory ends where they must stop."""

import ctypes
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.ops import IS_BFLOAT16
from blockdraft.kernels.cpu.products import NativeProduct


class Guarded:
    """Bytes that end (or begin) where memory ends: who goes beyond them is killed."""

    def __init__(self, num_bytes: int, *, at_end: bool) -> None:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = mmap.mmap(-1, size + 2 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = start + mmap.PAGESIZE + (size - num_bytes if at_end else 0)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for page in (start, start + mmap.PAGESIZE + size):
            assert protect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0

    def hold(self, values: Tensor) -> int:
        ctypes.memmove(self.address, values.contiguous().data_ptr(), values.nbytes)
        return self.address


def check_stays_inside(product: NativeProduct, rows: Iterable[Tensor], *, at_end: bool) -> None:
    """Of weight, scales, bias, rows and outputs nothing beside them is read or written.

    A sanitizer does not see the instructions of matrix registers, nor where a weight ends among
    others in one mapping.
    """
    kernels = library()
    assert isinstance(kernels, Library)
    struct = type(product.struct).from_buffer_copy(product.struct)
    held = {"weight": product.weight, "scales": product._scales, "bias": product._bias}
    guards = []
    for name, values in held.items():
        if values is not None:
            guards.append(Guarded(values.nbytes, at_end=at_end))
            setattr(struct, name, guards[-1].hold(values))
    for own in rows:
        expected = product(own)
        before, after = (Guarded(own.nbytes, at_end=at_end) for own in (own, expected))
        kernels.multiply(
            IS_BFLOAT16[own.dtype], ctypes.addressof(struct), after.address, before.hold(own),
            len(own), 2,
        )  # fmt: skip
        found = torch.empty_like(expected)
        ctypes.memmove(found.data_ptr(), after.address, found.nbytes)
        assert torch.equal(found, expected)
