"""The survivors of filters, found among the few tokens that can survive.

The same as `filters.survivors`, to the bit, without a pass in float64 over the vocabulary. Where
that cannot be guaranteed, that is what runs.
"""

import numpy as np

from blockdraft.core.request import SamplingParams
from blockdraft.speculate.sampler.filters import Indices, filtered, filters, keep_min_p, survivors
from blockdraft.speculate.sampler.logits import Scores, tempered

STRIDE = 16
"""How large the largest tokens are is estimated from one token in so many."""
NUCLEUS = 256
"""Top-p is decided among the largest tokens, at least so many."""
_ROUNDING = 1e-9
_SUM_ERROR = 2e-5
"""Of a sum of weights in float32, relative to it. Three times what rounding can do: exponents down
to -20, below which nothing counts, are off by 4e-6 at most, and the sum of 200,000 by 2e-6."""
_TEMPERATURES = 1e-3, 1e3
"""The range in which sums in float32 are accurate enough; outside it they are not used."""


def quick_survivors(scores: Scores, top: np.float32, params: SamplingParams) -> Indices | None:
    """Ids left by the filters, ascending; None if nothing filters. `top` is the largest score."""
    if not filters(params):
        return None
    if params.top_p < 1.0 and params.top_k == 0:
        nucleus = _nucleus(scores, top, params)
        if nucleus is None:
            return survivors(scores, params)
        if params.min_p > 0.0:
            values = tempered(scores[nucleus], top, params.temperature)
            nucleus = nucleus[keep_min_p(values, params.min_p)]
        return nucleus
    if params.top_k:
        near = _largest(scores, params.top_k)
    else:
        distance = float(np.log(params.min_p))
        near = np.flatnonzero(scores >= threshold(top, params.temperature, distance))
    return survivors(scores, params) if near is None else filtered(scores, top, near, params)


def threshold(top: np.float32, temperature: float, distance: float) -> np.float32:
    """A score t so that (score - top) / temperature < distance for all scores below t."""
    exact = float(top) + (distance - _ROUNDING) * temperature - 1e-15 * abs(float(top))
    with np.errstate(over="ignore"):
        below: np.float32 = np.nextafter(np.float32(exact), np.float32(-np.inf))
    return below


def _largest(scores: Scores, num: int) -> Indices | None:
    """The largest tokens, at least `num` and with all ties; None if they are not found this way."""
    some = scores[::STRIDE]
    rank = 2 * num // STRIDE + 8
    if rank > some.shape[0]:
        return None
    least = np.partition(some, -rank)[-rank]
    ids = np.flatnonzero(scores >= least)
    return ids if ids.shape[0] >= num and least > -np.inf else None


def _nucleus(scores: Scores, top: np.float32, params: SamplingParams) -> Indices | None:
    """What top-p keeps; None if it is not certain."""
    lowest, highest = _TEMPERATURES
    near = _largest(scores, NUCLEUS) if lowest <= params.temperature <= highest else None
    if near is None:
        return None
    values = tempered(scores[near], top, params.temperature)
    # A stable sort of descending values leaves ties in ascending id order.
    order = np.argsort(-values, kind="stable")
    reached = np.cumsum(np.exp(values[order]))
    total = _sum_of_weights(scores, top, params.temperature)
    first, last = np.searchsorted(
        reached, [params.top_p * total * (1 + error) for error in (-_SUM_ERROR, _SUM_ERROR)]
    )
    # Tokens that are not near may tie with the last one that is.
    if first != last or last == order.shape[0] or values[order[last]] == values[order[-1]]:
        return None
    return np.sort(near[order[: last + 1]])


def _sum_of_weights(scores: Scores, top: np.float32, temperature: float) -> float:
    """The sum of exp((scores - top) / T), up to rounding in float32."""
    with np.errstate(over="ignore"):
        exponents = (scores - top) / np.float32(temperature)
    return float(np.exp(exponents, out=exponents).sum())
