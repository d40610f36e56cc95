"""Filters on the few tokens that can survive, against the filters on all."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from blockdraft.core.request import SamplingParams
from blockdraft.speculate.sampler import shortlist
from blockdraft.speculate.sampler.filters import survivors
from blockdraft.speculate.sampler.logits import tempered
from blockdraft.speculate.sampler.shortlist import quick_survivors, threshold

TEMPERATURES = 5e-324, 1e-6, 0.01, 0.3, 0.7, 1.0, 2.0, 5.0, 1e30, 1e300


def random_scores(draw: random.Random) -> NDArray[np.float32]:
    numbers = np.random.default_rng(draw.getrandbits(32))
    scores = numbers.normal(0.0, draw.choice([0.5, 2.5, 5.0]), draw.choice([700, 5_000, 30_000]))
    kind = draw.choice(["plain", "plain", "ties", "flat", "holes", "huge", "peaked"])
    if kind == "ties":
        scores = np.round(scores)
    elif kind == "flat":
        scores[:] = 3.0
    elif kind == "holes":
        scores[numbers.random(scores.shape) < draw.choice([0.5, 0.99])] = -np.inf
        scores[-1] = 1.0
    elif kind == "huge":
        scores *= 1e25
    elif kind == "peaked":
        scores[numbers.integers(0, scores.shape[0], 30)] += 12.0
    return scores.astype(np.float32)


def random_filters(draw: random.Random) -> SamplingParams:
    options = {
        "top_k": draw.choice([1, 2, 50, 256, 3_000, 2**70]),
        "top_p": draw.choice([1e-9, 0.3, 0.9, 0.95, 0.999999]),
        "min_p": draw.choice([1e-300, 1e-6, 0.05, 1.0]),
    }
    chosen = {name: value for name, value in options.items() if draw.random() < 0.6}
    return SamplingParams(temperature=draw.choice(TEMPERATURES), **chosen)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(10))
def test_the_survivors_are_those_of_all(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        scores, params = random_scores(draw), random_filters(draw)
        expected = survivors(scores, params)
        found = quick_survivors(scores, scores.max(), params)
        if expected is None or found is None:
            assert expected is found
        else:
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("filters", [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_all_of_the_vocabulary_is_rarely_looked_at(
    filters: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[SamplingParams] = []

    def counting(scores: NDArray[np.float32], params: SamplingParams) -> object:
        calls.append(params)
        return survivors(scores, params)

    monkeypatch.setattr(shortlist, "survivors", counting)
    params = SamplingParams(temperature=0.7, **filters)  # type: ignore[arg-type]
    numbers = np.random.default_rng(0)
    for _ in range(50):
        scores = numbers.normal(0.0, 2.5, 20_000).astype(np.float32)
        scores[numbers.integers(0, 20_000, 30)] += 12.0
        quick_survivors(scores, scores.max(), params)
    assert len(calls) <= 5


@pytest.mark.parametrize("temperature", [0.001, 0.3, 0.7, 1.0, 5.0, 1e3])
@pytest.mark.parametrize("size", [700, 49_152, 151_936])
def test_the_sum_in_float32_errs_less_than_is_allowed_for(temperature: float, size: int) -> None:
    for seed in range(5):
        numbers = np.random.default_rng(seed)
        scores = numbers.normal(0.0, 3.0, size).astype(np.float32)
        exact = np.exp(tempered(scores, scores.max(), temperature)).sum()
        found = shortlist._sum_of_weights(scores, scores.max(), temperature)
        assert abs(found / exact - 1.0) < shortlist._SUM_ERROR / 3


def test_a_wrong_sum_is_found_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortlist, "_sum_of_weights", lambda *args: 2.0)
    with pytest.raises(AssertionError):
        test_the_survivors_are_those_of_all(0)


def test_nothing_below_the_threshold_is_near() -> None:
    draw = random.Random(0)
    for _ in range(300):
        scores, temperature = random_scores(draw), draw.choice(TEMPERATURES)
        distance = draw.choice([-40.0, -9.0, -1e-3, 0.0])
        top = scores.max()
        values = tempered(scores, top, temperature)
        below = scores < threshold(top, temperature, distance)
        assert (values[below] < distance).all()
