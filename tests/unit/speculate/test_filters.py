"""Filters against brute force, on scores with many ties."""

import math
import random

import numpy as np
import pytest

from blockdraft.speculate.sampler.filters import FIRST_PART, keep_min_p, keep_top_k, keep_top_p


def ranked(scores: list[float]) -> list[int]:
    """Indices by value, ties by id."""
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))


def tied_scores(size: int, levels: int, seed: int) -> list[float]:
    generator = random.Random(seed)
    return [0.5 * generator.randrange(levels) for _ in range(size)]


@pytest.mark.parametrize("levels", [1, 2, 5, 50])
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_top_k_keeps_the_largest_and_ties_of_low_id(size: int, levels: int) -> None:
    for seed in range(10):
        scores = tied_scores(size, levels, seed)
        for k in range(1, size + 2):
            kept = keep_top_k(np.array(scores, dtype=np.float32), k).tolist()
            assert kept == sorted(ranked(scores)[:k])


def brute_top_p(scores: list[float], p: float) -> list[int]:
    weights = [math.exp(score - max(scores)) for score in scores]
    kept, total = [], 0.0
    for index in ranked(scores):
        kept.append(index)
        total += weights[index]
        if total >= p * math.fsum(weights):
            break
    return sorted(kept)


@pytest.mark.parametrize("levels", [1, 2, 5, 50])
@pytest.mark.parametrize("size", [1, 2, 9, 40])
def test_top_p_keeps_the_fewest_that_reach_p(size: int, levels: int) -> None:
    generator = random.Random(size)
    for seed in range(30):
        scores = tied_scores(size, levels, seed)
        p = generator.uniform(0.001, 0.999)
        assert keep_top_p(np.array(scores), p).tolist() == brute_top_p(scores, p)


@pytest.mark.parametrize("size", [FIRST_PART, FIRST_PART + 1, 5 * FIRST_PART])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_top_p_reads_on_when_the_first_part_holds_too_little(size: int, levels: int) -> None:
    scores = [score / levels for score in tied_scores(size, levels, seed=1)]
    for p in (0.01, 0.21, 0.77, 0.993):
        assert keep_top_p(np.array(scores), p).tolist() == brute_top_p(scores, p)


def test_top_p_keeps_at_least_one_and_never_more_than_all() -> None:
    scores = np.array([0.0, 5.0, 5.0])
    assert keep_top_p(scores, 1e-12).tolist() == [1]
    assert keep_top_p(np.zeros(8), 0.5).tolist() == [0, 1, 2, 3]
    assert keep_top_p(np.array([800.0, 0.0]), 0.999999).tolist() == [0]


def test_min_p_compares_with_the_most_likely() -> None:
    for seed in range(20):
        scores = tied_scores(30, 12, seed)
        for min_p in (0.01, 0.09, 0.3, 0.7):
            weights = [math.exp(score - max(scores)) for score in scores]
            expected = [index for index, weight in enumerate(weights) if weight >= min_p]
            assert keep_min_p(np.array(scores), min_p).tolist() == expected
    assert keep_min_p(np.array([1.0, 3.0, 3.0]), 1.0).tolist() == [1, 2]
