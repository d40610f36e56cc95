"""top-k, top-p and min-p without sorting a vocabulary.

Each takes scores [n] of tokens in ascending id order and returns the indices kept, ascending. Ties
at the border go by value, then by id.
"""

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]

FIRST_PART = 256
"""Tokens sorted first by top-p; more only if these do not hold enough probability."""


def keep_top_k(scores: NDArray[np.floating], k: int) -> Indices:
    """The k largest."""
    if k >= scores.shape[0]:
        return np.arange(scores.shape[0])
    border = np.partition(scores, -k)[-k]
    above = np.flatnonzero(scores > border)
    ties = np.flatnonzero(scores == border)[: k - above.shape[0]]
    return np.sort(np.concatenate([above, ties]))


def keep_top_p(scores: NDArray[np.float64], p: float) -> Indices:
    """The fewest most likely tokens whose probability reaches p; at least one.

    Probabilities are the softmax of `scores`.
    """
    weights = np.exp(scores - scores.max())
    wanted = p * weights.sum()
    part = min(FIRST_PART, scores.shape[0])
    while True:
        largest = keep_top_k(scores, part)
        # A stable sort of descending values leaves ties in ascending id order.
        order = largest[np.argsort(-scores[largest], kind="stable")]
        reached = np.flatnonzero(np.cumsum(weights[order]) >= wanted)
        if reached.shape[0]:
            return np.sort(order[: reached[0] + 1])
        if part == scores.shape[0]:
            return np.sort(order)
        part = min(4 * part, scores.shape[0])


def keep_min_p(scores: NDArray[np.float64], min_p: float) -> Indices:
    """Tokens at least min_p times as likely as the most likely one."""
    return np.flatnonzero(scores >= scores.max() + np.log(min_p))
