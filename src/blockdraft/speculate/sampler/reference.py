"""The rule of the choice in its plainest form: one row, and the noise of a whole vocabulary."""

from dataclasses import dataclass

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
    return found if isinstance(found, int) else with_noise(found)


@dataclass(frozen=True, slots=True, eq=False)
class Undecided:
    """A place where the noise decides: its processed logits [V], and the largest of them."""

    place: Place
    scores: Scores
    top: np.float32


def without_noise(scores: Scores, place: Place) -> int | Undecided:
    """The choice where noise decides nothing.

    Raises:
        RequestError: nothing may be chosen.
    """
    # A NaN counts as the largest. No processing may hide it: what made it may have made others.
    best = int(scores.argmax())
    if not scores[best] > -np.inf:
        return NO_CHOICE
    if place.sequence.params.changes_logits:
        scores = processed(scores, place)
        best = int(scores.argmax())
    return of_processed(scores, best, place)


def of_processed(scores: Scores, best: int, place: Place) -> int | Undecided:
    """The choice where noise decides nothing, given processed logits [V], largest at `best`."""
    # An infinite logit outweighs all noise.
    if place.sequence.params.temperature == 0.0 or scores[best] == np.inf:
        return best
    return Undecided(place, scores, scores[best])


def with_noise(row: Undecided) -> int:
    """argmax of scores / T + noise over the survivors, in float64; a sample of their softmax."""
    params = row.place.sequence.params
    values = tempered(row.scores, row.top, params.temperature)
    values += gumbel_noise(row.place.stream, row.scores.shape[0])
    ids = survivors(row.scores, params)
    return int(values.argmax()) if ids is None else int(ids[values[ids].argmax()])
