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
    """Standard Gumbel noise [vocab_size] of one absolute position of one sample; do not write to it.

    Philox is a bijection of its counter for every key. The key holds the seed (64 bits) and the
    sample index, the counter's second word the position, and the first word counts along the
    vocabulary, so no two tokens, positions, samples or seeds share a draw. A larger vocabulary
    appends draws and changes none. With u = (k + 0.5) * 2^-53 and k of 53 bits, u never reaches 0 or
    1, so that rare tokens keep their chance.
    """
    generator = np.random.Philox(counter=[0, position, 0, 0], key=[seed, sample_index])
    raw = generator.random_raw(vocab_size)
    uniform = ((raw >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    noise.flags.writeable = False
    return noise
