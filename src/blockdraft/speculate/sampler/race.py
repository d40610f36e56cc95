"""The reference's choice with noise for a few tokens only: those that can still win.

No noise outside a position's large noise exceeds a bound. So once some token is known to reach a
value, all others matter only if their logit comes within that bound of it.
"""

from dataclasses import dataclass

import numpy as np

from blockdraft.speculate.sampler.filters import Indices
from blockdraft.speculate.sampler.logits import tempered
from blockdraft.speculate.sampler.noise import MIN_NOISE, Noise, large_noise, noise_at
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.speculate.sampler.reference import Undecided, with_noise
from blockdraft.speculate.sampler.shortlist import quick_survivors, threshold

MAX_SHARE = 16
"""Where more than one token in this many can win, the noise of all is drawn instead."""
MAX_FILTERED = 512
"""If no more tokens survive the filters, all of them get noise."""
MAX_TOGETHER = 2**15
"""Tokens whose noise is drawn at once."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Tokens `ids` that can win a place, ascending, with their logits over the temperature.

    `leader` can win too; its value with noise is known already.
    """

    stream: Stream
    ids: Indices
    values: Noise
    leader: int = -1
    leader_value: float = -np.inf

    def winner(self, noise: Noise) -> int:
        """The token of the largest value, given the noise of `ids`; the lowest id of several."""
        if self.ids.shape[0] == 0:
            return self.leader
        totals = self.values + noise
        best = int(totals.argmax())
        token_id, value = int(self.ids[best]), float(totals[best])
        if value == self.leader_value:
            return min(token_id, self.leader)
        return token_id if value > self.leader_value else self.leader


def contest(row: Undecided) -> Contest | None:
    """Who can win there; None if they are too many."""
    params, stream = row.place.sequence.params, row.place.stream
    scores, top = row.scores, row.top
    ids = quick_survivors(scores, top, params)
    if ids is not None and ids.shape[0] <= MAX_FILTERED:
        return Contest(stream, ids, tempered(scores[ids], top, params.temperature))
    large = large_noise(stream, scores.shape[0])
    own, noise = large.ids, large.noise
    if ids is not None:
        survives = np.zeros(scores.shape[0], dtype=np.bool_)
        survives[ids] = True
        own, noise = own[survives[own]], noise[survives[own]]
    leader, best = -1, -np.inf
    if own.shape[0]:
        totals = tempered(scores[own], top, params.temperature) + noise
        index = int(totals.argmax())
        leader, best = int(own[index]), float(totals[index])
    needed = threshold(top, params.temperature, max(best, MIN_NOISE) - large.bound)
    near = np.flatnonzero(scores >= needed)
    if ids is not None:
        near = near[survives[near]]
    if near.shape[0] * MAX_SHARE > scores.shape[0]:
        return None
    return Contest(stream, near, tempered(scores[near], top, params.temperature), leader, best)


def winners(rows: list[Undecided]) -> list[int]:
    """The choices that noise decides."""
    found: list[int] = []
    waiting: list[Contest] = []
    num_waiting = 0
    for row in rows:
        entrants = contest(row)
        if entrants is None:
            found += [*_decided(waiting), with_noise(row)]
            waiting, num_waiting = [], 0
            continue
        waiting.append(entrants)
        num_waiting += entrants.ids.shape[0]
        if num_waiting > MAX_TOGETHER:
            found += _decided(waiting)
            waiting, num_waiting = [], 0
    return found + _decided(waiting)


def _decided(contests: list[Contest]) -> list[int]:
    """The winners; all noise is drawn together."""
    if not contests:
        return []
    ids = np.concatenate([each.ids for each in contests])
    counts = [each.ids.shape[0] for each in contests]
    noise = noise_at([each.stream for each in contests], counts, ids)
    ends = np.cumsum(counts)
    return [
        each.winner(noise[end - each.ids.shape[0] : end])
        for each, end in zip(contests, ends.tolist(), strict=True)
    ]
