"""Gumbel noise that belongs to a token at a position, and to nothing else."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CACHE_BYTES = 64 * 2**20
"""Noise that is kept, per size of vocabulary: the drafter and the target ask for the same in a
step. 16 sequences that draft 8 tokens each fit at 50,000 tokens; what does not fit is drawn again,
with the same values."""
_MAX_CACHED = 1024

Noise = NDArray[np.float64]


def gumbel_noise(seed: int, sample_index: int, position: int, vocab_size: int) -> Noise:
    """Standard Gumbel noise [vocab_size] of an absolute position of one sample; read only.

    Philox is a bijection of its counter for every key. The key holds the seed (64 bits) and the
    sample index, the counter's second word the position, and the first word counts along the
    vocabulary, so no two tokens, positions, samples or seeds share a draw. A larger vocabulary
    appends draws and changes none. With u = (k + 0.5) * 2^-52 and k of 52 bits, which is
    exact in float64, u never reaches 0 or 1, so that rare tokens keep their chance.
    """
    return _cached_draw(vocab_size)(seed, sample_index, position, vocab_size)


@lru_cache(maxsize=2)
def _cached_draw(vocab_size: int) -> Callable[[int, int, int, int], Noise]:
    """A cache whose size in bytes does not depend on the vocabulary."""
    size = CACHE_BYTES // (vocab_size * np.dtype(np.float64).itemsize)
    return lru_cache(maxsize=min(max(size, 1), _MAX_CACHED))(_draw)


def _draw(seed: int, sample_index: int, position: int, vocab_size: int) -> Noise:
    # Typed: numpy turns a list with a seed of 64 bits and a small number into float64.
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    generator = np.random.Philox(counter=counter, key=key)
    raw = generator.random_raw(vocab_size)
    uniform = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: Noise = -np.log(-np.log1p(-uniform))
    noise.flags.writeable = False
    return noise
