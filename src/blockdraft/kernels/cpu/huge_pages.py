"""Memory in large pages, where the system has them, for what every step reads from end to end.

A page of 2 MiB is looked up once, one of 4 KiB five hundred times, and each look delays what is
fetched ahead. Linux gives large pages to those who ask before they write (`madvise`).
"""

import mmap
from collections import deque
from contextlib import suppress
from threading import Lock
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 2**21
BLOCK = 2**25
"""Bytes asked of the system at once: most weights of a layer do not fill a page of their own."""
ALIGNED = 4096
"""Bytes. Tensors begin with a small page: weights are fetched page by page."""


class _Block:
    """Large pages that tensors share; given back to the system with the last of them.

    What was taken last is taken again once it is free: a layer is tried with copies of its weights.
    """

    def __init__(self, num_bytes: int) -> None:
        """At least so many bytes.

        Raises:
            OSError: there is no memory left.
        """
        self._num_bytes = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, self._num_bytes + HUGE_PAGE, flags=flags)
        with suppress(OSError):  # a system without large pages, on which small ones do
            memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(memory, np.uint8)
        self._bytes = whole[-whole.ctypes.data % HUGE_PAGE :]
        self._end = 0
        self._free: dict[int, int] = {}
        """Where what was taken and is free begins, by its end."""
        self._freed: deque[tuple[int, int]] = deque()
        """The same, newly: objects end at any time, in any thread."""

    def take(self, num_bytes: int) -> Tensor | None:
        """So many bytes, uint8; None if there are not as many left."""
        while self._freed:
            end, begin = self._freed.popleft()
            self._free[end] = begin
        while self._end in self._free:
            self._end = self._free.pop(self._end)
        num_taken = max(1, -(-num_bytes // ALIGNED)) * ALIGNED
        begin, end = self._end, self._end + num_taken
        if end > self._num_bytes:
            return None
        own = self._bytes[begin : begin + num_bytes]
        # In this order: what is free before it counts as taken would be taken twice.
        self._end = end
        finalize(own, self._freed.append, (end, begin)).atexit = False
        return torch.from_numpy(own)


_lock = Lock()
_newest: _Block | None = None


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy there; the tensor itself on other devices and where there are none.

    Whoever shares the copy with other processes moves it, and its memory is taken by others.
    """
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    try:
        own = _take(tensor.numel() * tensor.itemsize)
    except OSError:  # no more memory of this kind; the tensor is there already
        return tensor
    return own.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


def _take(num_bytes: int) -> Tensor:
    global _newest
    with _lock:
        own = None if _newest is None else _newest.take(num_bytes)
        if own is None:
            block = _Block(max(num_bytes, BLOCK))
            own = block.take(num_bytes)
            if num_bytes < BLOCK:  # or it is full, and others go on in the block before
                _newest = block
        assert own is not None
        return own
