"""Philox4x64-10 at random access, with the bits of numpy's generator (Salmon et al., 2011)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Ids = NDArray[np.intp]

_ROUNDS = 10
# A column each for the words 0 and 2 of the counter, which a round multiplies.
_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_MULTIPLIERS_LOW, _MULTIPLIERS_HIGH = _MULTIPLIERS & _LOW, _MULTIPLIERS >> _HALF


@dataclass(frozen=True, slots=True)
class Stream:
    """The random words of one absolute position of one sample, a word a token.

    Philox is a bijection of its counter for every key. The key holds the seed (64 bits) and the
    sample index, the counter's second word the position, and its first word counts along the
    vocabulary, four tokens each. So no two tokens, positions, samples or seeds share a word.
    """

    seed: int
    sample_index: int
    position: int

    def first(self, num: int) -> Words:
        """The words of the tokens below `num`."""
        # Typed: numpy turns a list with a seed of 64 bits and a small number into float64.
        key = np.array([self.seed, self.sample_index], dtype=np.uint64)
        counter = np.array([0, self.position, 0, 0], dtype=np.uint64)
        words: Words = np.random.Philox(counter=counter, key=key).random_raw(num)
        return words


def words_at(streams: list[Stream], counts: list[int], ids: Ids) -> Words:
    """The words of tokens `ids` [n]: the first `counts[0]` of the first stream, and so on."""
    keys = np.array([(s.seed, s.sample_index) for s in streams], dtype=np.uint64)
    positions = np.array([s.position for s in streams], dtype=np.uint64)
    # numpy's generator counts before it draws.
    blocks = (ids >> 2).astype(np.uint64) + np.uint64(1)
    multiplied = np.stack([blocks, np.zeros_like(blocks)])
    added = np.stack([np.repeat(positions, counts), np.zeros_like(blocks)])
    key = np.repeat(keys, counts, axis=0).T.copy()
    for _ in range(_ROUNDS):
        high, low = _products(multiplied)
        multiplied = high[::-1] ^ added ^ key
        added = low[::-1]
        key += _KEY_STEPS
    words = np.stack([multiplied[0], added[0], multiplied[1], added[1]])
    found: Words = words[ids & 3, np.arange(ids.shape[0])]
    return found


def _products(words: Words) -> tuple[Words, Words]:
    """Both halves, 64 bits each, of words [2, n] times their multipliers."""
    low, high = words & _LOW, words >> _HALF
    cross = high * _MULTIPLIERS_LOW + (low * _MULTIPLIERS_LOW >> _HALF)
    other = low * _MULTIPLIERS_HIGH + (cross & _LOW)
    upper = high * _MULTIPLIERS_HIGH + (cross >> _HALF) + (other >> _HALF)
    return upper, words * _MULTIPLIERS
