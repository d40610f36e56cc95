"""top-k, top-p and min-p without sorting a vocabulary.

Each `keep_` takes scores [n] of tokens in ascending id order and returns the indices kept,
ascending. Ties at the border go by value, then by id.
"""

import numpy as np
from numpy.typing import NDArray

from blockdraft.core.request import SamplingParams
from blockdraft.speculate.sampler.logits import Scores, tempered

Indices = NDArray[np.intp]

FIRST_PART = 256
"""Tokens sorted first by top-p; more only if these do not hold enough probability."""


def survivors(scores: Scores, params: SamplingParams) -> Indices | None:
    """Ids left by top-k, top-p and min-p, in this order, ascending; None if nothing filters.

    top-p and min-p look at the probabilities at the request's temperature.
    """
    if not filters(params):
        return None
    return filtered(scores, scores.max(), np.flatnonzero(scores > -np.inf), params)


def filters(params: SamplingParams) -> bool:
    """True if not every token survives."""
    return params.top_k != 0 or params.top_p < 1.0 or params.min_p > 0.0


def filtered(scores: Scores, top: np.float32, ids: Indices, params: SamplingParams) -> Indices:
    """The survivors among `ids`, ascending; `top` is the largest of all scores."""
    if params.top_k:
        ids = ids[keep_top_k(scores[ids], params.top_k)]
    if params.top_p == 1.0 and params.min_p == 0.0:
        return ids
    values = tempered(scores[ids], top, params.temperature)
    if params.top_p < 1.0:
        kept = keep_top_p(values, params.top_p)
        ids, values = ids[kept], values[kept]
    if params.min_p > 0.0:
        ids = ids[keep_min_p(values, params.min_p)]
    return ids


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
