"""Gumbel noise that belongs to a token at a position, and to nothing else."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

CACHED_POSITIONS = 64
"""Positions whose noise is kept: the drafter and the target ask for the same ones in a step."""


@lru_cache(maxsize=CACHED_POSITIONS)
def gumbel_noise(
    seed: int, sample_index: int, position: int, vocab_size: int
) -> NDArray[np.float64]:
    """Standard Gumbel noise [vocab_size] of an absolute position of one sample; read only.

    Philox is a bijection of its counter for every key. The key holds the seed (64 bits) and the
    sample index, the counter's second word the position, and the first word counts along the
    vocabulary, so no two tokens, positions, samples or seeds share a draw. A larger vocabulary
    appends draws and changes none. With u = (k + 0.5) * 2^-52 and k of 52 bits, which is
    exact in float64, u never reaches 0 or 1, so that rare tokens keep their chance.
    """
    # Typed: numpy turns a list with a seed of 64 bits and a small number into float64.
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([0, position, 0, 0], dtype=np.uint64)
    generator = np.random.Philox(counter=counter, key=key)
    raw = generator.random_raw(vocab_size)
    uniform = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    noise.flags.writeable = False
    return noise
