import hashlib
import itertools
from typing import Any

import numpy as np
import pytest

from blockdraft.kernels.backends import random_words
from blockdraft.speculate.sampler import noise as noise_module
from blockdraft.speculate.sampler import philox as philox_module
from blockdraft.speculate.sampler.noise import (
    MAX_KEPT,
    MIN_NOISE,
    NUM_LARGEST,
    gumbel_noise,
    large_noise,
    noise_at,
)
from blockdraft.speculate.sampler.philox import Stream, words_at, words_below

FIRST, OTHER, LAST = (0, 0, 0), (1234, 5, 678), (2**64 - 1, 65535, 40959)
"""Seed, sample and position of streams."""
FIRST_NOISE = {FIRST: 4.455549547963329, OTHER: 2.2948880758337693, LAST: -1.3249047963707827}
"""Of token 0, whatever the vocabulary is."""
GOLDEN: tuple[tuple[int, tuple[int, int, int], str, tuple[float, float], int, int], ...] = (
    (5, FIRST, "214112dd69ca1eb3", (2.135908738154891, 0.3596540195515142), 0, 3),
    (5, OTHER, "d811022e2ba57038", (3.42074731844596, 1.0664272082136321), 2, 3),
    (5, LAST, "480aa6c0cbb3b477", (0.5239362521697043, -0.523275252053717), 1, 0),
    (97, FIRST, "7fd08100b1ddc450", (-0.437844559048165, -0.1375584753763004), 66, 27),
    (97, OTHER, "cb5b4878f82caeba", (0.9374592903425683, -1.2801866535585098), 85, 3),
    (97, LAST, "a6ed49d43305535b", (2.2725381631044446, 8.599716077837954), 96, 14),
    (49152, FIRST, "d5ddeb586c9bd3d1", (-0.1752508319582006, -0.381500407052668), 47848, 26614),
    (49152, OTHER, "6d05ed6cfc6f988a", (1.0879595346671531, 1.0369777361871995), 38437, 39775),
    (49152, LAST, "48307d8c4d2fc36c", (-0.24826029820110332, -0.4883766846479279), 21343, 32186),
    (151936, FIRST, "2187b29ead130e37", (-0.008659092090189014, -0.8406509857587113), 68642, 26614),
    (151936, OTHER, "4888bee2381172ba", (1.5658571669234154, 2.415335700379965), 55133, 39775),
    (151936, LAST, "b4b82fddad68b895", (0.8574139814061014, -0.9388676572659788), 80823, 82801),
)
"""Vocabulary, stream, digest of the words, noise of the middle and the last token, and which tokens
have the most and the least."""


@pytest.fixture(params=["kernels", "numpy"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to get words; what was kept of the other is forgotten."""
    large_noise.cache_clear()
    if request.param == "numpy":
        monkeypatch.setattr(philox_module, "random_words", lambda: None)
    elif random_words() is None:
        pytest.skip("no kernels on this machine")
    name: str = request.param
    return name


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: str(golden[:2]))
def test_the_noise_is_this_for_good(golden: Any, form: str) -> None:
    """A seed means the same text in every version. Logarithms may differ in the last bit."""
    vocab_size, key, digest, values, most, least = golden
    stream = Stream(*key)
    tokens = np.array([0, vocab_size // 2, vocab_size - 1])
    every = np.arange(vocab_size)
    for words in (stream.first(vocab_size), words_at([stream], [vocab_size], every)):
        assert hashlib.sha256((words >> 12).astype("<u8").tobytes()).hexdigest()[:16] == digest
    whole, single = gumbel_noise(stream, vocab_size), noise_at([stream], [3], tokens)
    expected = [FIRST_NOISE[key], *values]
    assert single.tolist() == pytest.approx(expected, rel=1e-14, abs=1e-14)
    assert np.array_equal(single, whole[tokens])
    assert (int(whole.argmax()), int(whole.argmin())) == (most, least)


@pytest.mark.parametrize("num", [1, 7, 8, 9, 300])
def test_noise_of_single_tokens_is_that_of_the_whole_vocabulary(num: int, form: str) -> None:
    """To the bit, wherever a token stands among those that are asked for."""
    draw = np.random.default_rng(num)
    streams = [Stream(5, 0, 9), Stream(*LAST), Stream(0, 1, 0)]
    ids = draw.integers(0, 151_936, 3 * num)
    counts = [num, 0, 2 * num]
    found = noise_at(streams, counts, ids)
    assert np.array_equal(found[:num], gumbel_noise(streams[0], 151_936)[ids[:num]])
    assert np.array_equal(found[num:], gumbel_noise(streams[2], 151_936)[ids[num:]])
    assert noise_at(streams, [0, 0, 0], ids[:0]).shape == (0,)


@pytest.mark.parametrize("vocab_size", [1, 5, 97, 256, 257, 1_003, 49_152, 151_936])
def test_large_noise_leaves_out_no_token_above_its_bound(vocab_size: int, form: str) -> None:
    for stream in (Stream(0, 0, 0), Stream(*LAST), Stream(3, 2, 77)):
        whole, large = gumbel_noise(stream, vocab_size), large_noise(stream, vocab_size)
        assert np.array_equal(large.noise, whole[large.ids])
        assert (np.diff(large.ids) > 0).all()
        others = np.delete(whole, large.ids)
        assert others.max(initial=-np.inf) <= large.bound
        assert whole.min() >= MIN_NOISE
        if vocab_size > 20 * NUM_LARGEST:
            assert NUM_LARGEST / 2 < large.ids.shape[0] < 2 * NUM_LARGEST
            assert large.noise.min() > large.bound - 1e-6


def test_more_words_than_were_expected_are_all_found(form: str) -> None:
    stream = Stream(1, 2, 3)
    words = stream.first(1_000)
    ids, found = words_below(stream, 1_000, 2**63, expected=10)
    assert np.array_equal(ids, np.flatnonzero(words < 2**63))
    assert np.array_equal(found, words[ids])


def test_no_two_draws_are_shared() -> None:
    """Also not by keys whose sums are equal: seed + position is no key."""
    seeds = (0, 1, 2, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)
    keys = itertools.product(seeds, (0, 1, 2, 65535), (0, 1, 2, 511, 4096))
    draws = np.concatenate([gumbel_noise(Stream(*key), 64) for key in keys])
    assert len(np.unique(draws)) == draws.shape[0]


def test_a_larger_vocabulary_appends_draws() -> None:
    """Padding of a vocabulary changes no choice."""
    small, large = gumbel_noise(Stream(7, 3, 11), 97), gumbel_noise(Stream(7, 3, 11), 128)
    assert np.array_equal(small, large[:97])


def test_the_distribution_is_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(Stream(3, 0, position), 50_000) for position in range(4)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, abs=0.03)
    for x in (-1.0, 0.0, 2.0, 6.0):
        assert (noise <= x).mean() == pytest.approx(np.exp(-np.exp(-x)), abs=0.005)
    # float32 uniforms would end at 16.6 and repeat values.
    assert len(np.unique(noise)) == noise.shape[0]


def test_positions_and_samples_are_independent() -> None:
    base = gumbel_noise(Stream(9, 0, 100), 20_000)
    for other in (gumbel_noise(Stream(9, 0, 101), 20_000), gumbel_noise(Stream(9, 1, 100), 20_000)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03
        assert abs(np.corrcoef(base[1:], other[:-1])[0, 1]) < 0.03


def test_the_most_extreme_words_stay_finite() -> None:
    noise = noise_module._noise_of(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert np.isfinite(noise).all()
    assert MIN_NOISE < noise[1] < -3.5
    assert noise[0] > 36.0


def test_the_step_of_a_large_batch_is_kept_in_bounded_memory() -> None:
    """64 sequences that draft 16 tokens each, with any vocabulary."""
    assert large_noise.cache_info().maxsize == MAX_KEPT
    assert MAX_KEPT >= 64 * 17
    kept = large_noise(Stream(1, 0, 0), 262_144)
    assert MAX_KEPT * (kept.ids.nbytes + kept.noise.nbytes) < 32 * 2**20
    # Views would keep what they are cut from.
    assert kept.ids.base is None


def test_kernels_refuse_what_they_would_read_beyond() -> None:
    native = random_words()
    if native is None:
        pytest.skip("no kernels on this machine")
    stream = Stream(1, 2, 3).address()
    ids, counts = np.arange(4), np.array([5])
    with pytest.raises(ValueError, match="streams"):
        native.words_at(stream[None], counts, ids)
    with pytest.raises(ValueError, match="streams"):
        native.words_at(stream[None, :2], np.array([4]), ids)
    with pytest.raises(ValueError, match="below 0"):
        native.words_at(stream[None], np.array([4]), ids - 1)
    with pytest.raises(ValueError, match="below 0"):
        native.words_at(np.stack([stream] * 2), np.array([5, -1]), ids)
    with pytest.raises(ValueError, match="stream"):
        native.words_below(stream[:2], 9, 2**63, 4)
