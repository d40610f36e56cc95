"""Gumbel noise that belongs to a token at a position, and to nothing else."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from blockdraft.speculate.sampler.philox import Ids, Stream, Words, words_at, words_below

Noise = NDArray[np.float64]

NUM_LARGEST = 256
"""Tokens, on average, that count as having large noise at a position."""
MAX_KEPT = 4096
"""Positions whose large noise is kept, about 4 KB each: the drafter and the target ask for the
same, and again in the next step where a draft was rejected."""
_MARGIN = 1e-9
"""Covers the rounding of logarithms."""


def gumbel_noise(stream: Stream, vocab_size: int) -> Noise:
    """Standard Gumbel noise [vocab_size] of a position.

    A larger vocabulary appends draws and changes none.
    """
    return _noise_of(stream.first(vocab_size))


def noise_at(streams: list[Stream], counts: list[int], ids: Ids) -> Noise:
    """The noise of single tokens: the first `counts[0]` of `ids` at the first stream, and so on."""
    return _noise_of(words_at(streams, counts, ids))


def _noise_of(words: Words) -> Noise:
    """The noise that a random word gives: the smaller the word, the larger the noise.

    With u = (k + 0.5) * 2^-52 and k of 52 bits, which is exact in float64, u never reaches 0 or 1,
    so that rare tokens keep their chance.
    """
    uniform = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: Noise = -np.log(-np.log1p(-uniform))
    return noise


MIN_NOISE = float(_noise_of(np.array([2**64 - 1], dtype=np.uint64))[0]) - _MARGIN
"""No noise is below."""


@dataclass(frozen=True, slots=True)
class LargeNoise:
    """The tokens of a position whose noise exceeds `bound`, ascending. No other token's does."""

    ids: Ids
    noise: Noise
    bound: float


@lru_cache(maxsize=MAX_KEPT)
def large_noise(stream: Stream, vocab_size: int) -> LargeNoise:
    """The largest noise of a position; it is the same for all who choose there."""
    limit = int(min(NUM_LARGEST / vocab_size, 1.0) * (2.0**64 - 2.0**12))
    ids, words = words_below(stream, vocab_size, limit, NUM_LARGEST)
    noise = _noise_of(np.append(words, np.uint64(limit)))
    return LargeNoise(ids, noise[:-1].copy(), float(noise[-1]) + _MARGIN)
