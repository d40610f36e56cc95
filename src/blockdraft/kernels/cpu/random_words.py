"""The words of numpy's Philox generator at random access; see `interface.RandomWords`."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.interface import Ids, Words

Number = TypeVar("Number", bound=np.generic)


class NativeWords:
    """By compiled kernels."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def words_at(self, streams: Words, counts: Ids, ids: Ids) -> Words:
        """See RandomWords.words_at."""
        streams, counts = _plain(streams, np.uint64), _plain(counts, np.int64)
        ids = _plain(ids, np.int64)
        # Asked for a few tokens at a time, often in a step: cheap, so few calls of numpy.
        numbers, num_ids = counts.tolist(), ids.shape[0]
        if streams.shape != (len(numbers), 3) or sum(numbers) != num_ids:
            raise ValueError(f"{streams.shape} streams and {counts} ids of each, of {num_ids}")
        if min(numbers, default=0) < 0 or (num_ids and int(ids.min()) < 0):
            raise ValueError("a count or an id is below 0")
        words = np.empty(num_ids, dtype=np.uint64)
        self._kernels.words_at(
            _address(words), _address(streams), _address(counts), len(numbers), _address(ids)
        )
        return words

    def words_below(
        self, stream: Words, num: int, limit: int, capacity: int
    ) -> tuple[Ids, Words] | None:
        """See RandomWords.words_below."""
        stream, num_threads = _plain(stream, np.uint64), torch.get_num_threads()
        if stream.shape != (3,) or num < 0 or capacity < 0:
            raise ValueError(f"{num} words of a stream {stream.shape}, at most {capacity}")
        ids = np.empty((num_threads, capacity), dtype=np.int64)
        words, counts = np.empty(ids.shape, dtype=np.uint64), np.empty(num_threads, dtype=np.int64)
        self._kernels.words_below(
            ids.ctypes.data, words.ctypes.data, counts.ctypes.data, capacity,
            stream.ctypes.data, num, limit, num_threads,
        )  # fmt: skip
        if (counts > capacity).any():
            return None
        return _joined(ids, counts), _joined(words, counts)


def _joined(parts: NDArray[Number], counts: Ids) -> NDArray[Number]:
    """The first `counts[i]` values of each part i."""
    return np.concatenate([own[:count] for own, count in zip(parts, counts.tolist(), strict=True)])


def _address(values: NDArray[np.generic]) -> int:
    """The same as `values.ctypes.data`, in half the time."""
    address: int = values.__array_interface__["data"][0]
    return address


def _plain(values: NDArray[np.generic], dtype: type[Number]) -> NDArray[Number]:
    """One value behind the other, of this type."""
    return np.ascontiguousarray(values, dtype=dtype)
