"""Philox4x64-10 at random access, with the words of numpy's generator (Salmon et al., 2011)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from blockdraft.kernels.backends import random_words

Words = NDArray[np.uint64]
Ids = NDArray[np.int64]

_ROUNDS = 10
# A row each for the words 0 and 2 of the counter, which a round multiplies.
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

    def address(self) -> Words:
        """The key (two words) and the second word of the counter, [3]."""
        # Typed: numpy turns a list with a seed of 64 bits and a small number into float64.
        return np.array([self.seed, self.sample_index, self.position], dtype=np.uint64)

    def first(self, num: int) -> Words:
        """The words of the tokens below `num`."""
        key, position = self.address()[:2], self.position
        counter = np.array([0, position, 0, 0], dtype=np.uint64)
        words: Words = np.random.Philox(counter=counter, key=key).random_raw(num)
        return words


def words_at(streams: list[Stream], counts: list[int], ids: Ids) -> Words:
    """The words of tokens `ids` [n]: the first `counts[0]` of the first stream, and so on."""
    addresses = np.array([(s.seed, s.sample_index, s.position) for s in streams], dtype=np.uint64)
    native = random_words()
    if native is None:
        return numpy_words_at(addresses, counts, ids)
    return native.words_at(addresses, np.array(counts), ids)


def words_below(stream: Stream, num: int, limit: int, expected: int) -> tuple[Ids, Words]:
    """Which tokens below `num` have words below `limit`, ascending, and their words.

    expected: how many there are, on average.
    """
    native = random_words()
    if native is not None:
        capacity = min(num, 2 * expected)
        found = native.words_below(stream.address(), num, limit, capacity)
        if found is not None:
            return found
    words = stream.first(num)
    ids = np.flatnonzero(words < np.uint64(limit))
    return ids, words[ids]


def numpy_words_at(addresses: Words, counts: list[int], ids: Ids) -> Words:
    """The same as `words_at`, of streams at addresses [k, 3]."""
    seeds, sample_indices, positions = np.repeat(addresses, counts, axis=0).T
    # numpy's generator counts before it draws.
    blocks = (ids >> 2).astype(np.uint64) + np.uint64(1)
    zeros = np.zeros_like(blocks)
    multiplied, added = np.stack([blocks, zeros]), np.stack([positions, zeros])
    key = np.stack([seeds, sample_indices])
    for _ in range(_ROUNDS):
        upper, lower = _products(multiplied)
        multiplied, added = upper[::-1] ^ added ^ key, lower[::-1]
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
