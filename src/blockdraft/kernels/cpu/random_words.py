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
        if streams.shape != (counts.shape[0], 3) or int(counts.sum()) != ids.shape[0]:
            raise ValueError(f"{streams.shape} streams and {counts} ids of each, of {ids.shape[0]}")
        if (counts < 0).any() or (ids < 0).any():
            raise ValueError("a count or an id is below 0")
        words = np.empty(ids.shape[0], dtype=np.uint64)
        self._kernels.words_at(
            words.ctypes.data,
            streams.ctypes.data,
            counts.ctypes.data,
            counts.shape[0],
            ids.ctypes.data,
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


def _plain(values: NDArray[np.generic], dtype: type[Number]) -> NDArray[Number]:
    """One value behind the other, of this type."""
    return np.ascontiguousarray(values, dtype=dtype)
