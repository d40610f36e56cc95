"""The rule of the choice in its plainest form: one row, and the noise of a whole vocabulary."""

import numpy as np

from blockdraft.speculate.sampler.filters import survivors
from blockdraft.speculate.sampler.logits import Place, Scores, processed, tempered
from blockdraft.speculate.sampler.noise import gumbel_noise

NO_CHOICE = -1
"""Stands for the choice where some logit is not a number, or all are -inf."""


def choose_row(scores: Scores, place: Place) -> int:
    """The choice at a place, given its logits [V]. Ties go to the lowest id.

    Raises:
        RequestError: nothing may be chosen.
    """
    found = without_noise(scores, place)
    return found if isinstance(found, int) else with_noise(found, place)


def without_noise(scores: Scores, place: Place) -> int | Scores:
    """The choice where noise decides nothing; elsewhere the processed logits.

    Raises:
        RequestError: nothing may be chosen.
    """
    # A NaN counts as the largest. No processing may hide it: what made it may have made others.
    largest = scores[scores.argmax()]
    if np.isnan(largest) or largest == -np.inf:
        return NO_CHOICE
    scores = processed(scores, place)
    top = int(scores.argmax())
    # An infinite logit outweighs all noise.
    if place.sequence.params.temperature == 0.0 or scores[top] == np.inf:
        return top
    return scores


def with_noise(scores: Scores, place: Place) -> int:
    """argmax of scores / T + noise over the survivors, in float64; a sample of their softmax."""
    params = place.sequence.params
    values = tempered(scores, scores.max(), params.temperature)
    values += gumbel_noise(place.stream, scores.shape[0])
    ids = survivors(scores, params)
    return int(values.argmax()) if ids is None else int(ids[values[ids].argmax()])
