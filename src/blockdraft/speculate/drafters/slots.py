"""How likely the target chooses each token of a slot, from a drafter's logits and the noise.

A sampled token is the target's choice under known noise, which decides the tokens that can win: the
score of a token is its logit plus temperature times its noise. Without noise that is the logit, so
towards temperature 0 the probabilities become those of a greedy request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.kernels.backends import backend_for
from blockdraft.speculate.drafters.branches import Slot
from blockdraft.speculate.sampler.filters import filters
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import Noise, large_noise, noise_at
from blockdraft.speculate.sampler.philox import Ids
from blockdraft.speculate.sampler.reference import choose_row

MOST_TEMPERATURE = 1e300
"""Larger ones count as this: times the noise, it is still a number."""
NUM_CANDIDATES = 32
"""Tokens of a slot that are looked at."""
SlotCandidates = tuple[Ids, Noise, Noise]
"""Token ids and logits [slots, n] of the largest, and `totals` [slots]; see `_shares`."""


@dataclass(frozen=True)
class Guessable:
    """The tokens that a drafter has logits for: `token_ids` [n], or the first n if that is None."""

    vocab_size: int
    token_ids: Tensor | None = None

    def over_whole_vocabulary(self, logits: Tensor) -> Tensor:
        """[.., n] -> [.., V]; tokens that are never guessed have -inf."""
        if self.token_ids is None and logits.shape[-1] == self.vocab_size:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        if self.token_ids is None:
            whole[..., : logits.shape[-1]] = logits
        else:
            whole[..., self.token_ids] = logits
        return whole

    def ids_at(self, places: Ids) -> Ids:
        """Token ids of places among the logits."""
        return places if self._ids is None else self._ids[places]

    def places_of(self, token_ids: Ids) -> Ids:
        """The other way around; -1 for tokens that are never guessed."""
        return token_ids if self._places is None else self._places[token_ids]

    @cached_property
    def _ids(self) -> Ids | None:
        return None if self.token_ids is None else self.token_ids.cpu().numpy()

    @cached_property
    def _places(self) -> Ids | None:
        if self._ids is None:
            return None
        places = np.full(self.vocab_size, -1)
        places[self._ids] = np.arange(len(self._ids))
        return places

    def token(self, place: int) -> int:
        """The id of one of them."""
        return place if self._ids is None else int(self._ids[place])


def slots_of(
    logits: Tensor,
    chain: Sequence[int | None],
    sample: Sample,
    guessable: Guessable,
    num_ahead: int = 0,
    *,
    is_one_position: bool = False,
) -> list[Slot]:
    """What a drafter thinks of the slots behind a sample's tokens, those of its chain first.

    None in the chain: the most probable token comes first.

    logits: [slots, tokens] as the request's penalties, bias and grammar left them, at least as many
    slots as the chain has. guessable: these tokens. num_ahead: tokens
    between the sample's and the first slot. is_one_position: the slots are of siblings, and all
    stand where the first one does.
    """
    ids, values, totals = candidates_of(logits[: len(chain)], guessable)
    noise = noise_of(ids, sample, num_ahead, is_one_position=is_one_position)
    return _slots(chain, ids, _shares(values, noise, totals))


def chosen_slots(
    logits: Tensor,
    sample: Sample,
    guessable: Guessable,
    known: SlotCandidates | None = None,
    num_ahead: int = 0,
) -> list[Slot]:
    """What a drafter thinks of the slots behind a sample's tokens, its choice there first.

    The choice is the target's rule on the drafter's logits, among the tokens of the largest logits
    and those of the largest noise: another token hardly ever wins. Where more tokens survive the
    request's filters than are looked at, it is the rule itself.

    logits: [slots, tokens] of a sample whose logits nothing changes. guessable: these tokens.
    known: what `candidates_of` says of them, for whoever has asked already. num_ahead: see
    `slots_of`.
    """
    ids, values, totals = known or candidates_of(logits, guessable)
    params = sample.params
    noise = noise_of(ids, sample, num_ahead)
    shares = _shares(values, noise, totals)
    firsts: list[int | None] = [None] * len(ids)
    if noise_temperature(params) > 0.0:
        if filters(params):
            survive = _survive(values, totals, params)
            shares = np.where(survive, shares, 0.0)
            for slot in np.flatnonzero(survive[:, -1]).tolist():
                whole = guessable.over_whole_vocabulary(logits[slot]).float().cpu().numpy()
                firsts[slot] = max(choose_row(whole, Place(sample, num_ahead + slot, [])), 0)
        else:
            best = (values + noise).max(1)
            firsts = _large_winners(logits, best, sample, guessable, num_ahead)
    return _slots(firsts, ids, shares)


def candidates_of_all(logits: Sequence[Tensor], guessable: Guessable) -> list[SlotCandidates]:
    """The same of each of these [slots, tokens]; with one wait for another device."""
    if not logits or logits[0].device.type == "cpu":
        return [candidates_of(own, guessable) for own in logits]
    ends = np.cumsum([own.shape[0] for own in logits])[:-1]
    found = candidates_of(torch.cat([*logits]), guessable)
    return list(zip(*(np.split(part, ends) for part in found), strict=True))


def candidates_of(logits: Tensor, guessable: Guessable) -> SlotCandidates:
    """What is looked at of logits [slots, tokens]."""
    found = backend_for(logits.dtype, logits.device).largest(logits, NUM_CANDIDATES)
    ids = guessable.ids_at(found.places)
    return ids, found.values.astype(np.float64), found.totals.astype(np.float64)


@np.errstate(over="ignore", invalid="ignore")
def _survive(values: Noise, totals: Noise, params: SamplingParams) -> NDArray[np.bool_]:
    """Which candidates [slots, n] the filters leave, as far as the candidates alone tell.

    Large numbers may overflow, see `tempered`. Where no logit is a number none is sure to be left.
    """
    ahead = (values - values[:, :1]) / params.temperature
    survive = np.ones(values.shape, np.bool_)
    if params.top_k:
        survive[:, params.top_k :] = False
    if params.top_p < 1.0:
        weights = np.exp(ahead)
        # All others together: at temperature 1, and then as their largest changes with it.
        rest = np.maximum(totals - np.exp(values - values[:, :1]).sum(1), 0.0)
        rest *= np.exp(ahead[:, -1] - (values[:, -1] - values[:, 0]))
        before = np.cumsum(weights, 1) - weights
        survive &= before < params.top_p * (weights.sum(1) + rest)[:, None]
    if params.min_p > 0.0:
        survive &= ahead >= np.log(params.min_p)
    return survive


def _large_winners(
    logits: Tensor, best: Noise, sample: Sample, guessable: Guessable, num_ahead: int
) -> list[int | None]:
    """Of each slot the token with large noise that beats `best` [slots], None if none does."""
    scores = logits.float().cpu().numpy()
    winners: list[int | None] = []
    for slot, own in enumerate(scores):
        large = large_noise(Place(sample, num_ahead + slot, []).stream, guessable.vocab_size)
        places = guessable.places_of(large.ids)
        is_known = (places >= 0) & (places < len(own))
        places, ids, noise = places[is_known], large.ids[is_known], large.noise[is_known]
        totals = own[places] + noise_temperature(sample.params) * noise
        at = int(totals.argmax()) if len(totals) else -1
        winners.append(int(ids[at]) if at >= 0 and totals[at] > best[slot] else None)
    return winners


def _slots(firsts: Sequence[int | None], ids: Ids, shares: Noise) -> list[Slot]:
    """From candidates and their probabilities [slots, n]. firsts: the leading token, if known."""
    order = np.argsort(-shares, axis=1, kind="stable")
    return [
        _slot(first, own_ids.tolist(), own_shares.tolist())
        for first, own_ids, own_shares in zip(
            firsts,
            np.take_along_axis(ids, order, 1),
            np.take_along_axis(shares, order, 1),
            strict=True,
        )
    ]


def noise_of(
    ids: Ids, sample: Sample, num_ahead: int = 0, *, is_one_position: bool = False
) -> Noise:
    """What the target's choice will add to the logits of the tokens `ids` [slots, n].

    See `slots_of` for num_ahead and is_one_position.
    """
    temperature = noise_temperature(sample.params)
    if temperature == 0.0:
        return np.zeros(ids.shape)
    ahead = [num_ahead + (0 if is_one_position else index) for index in range(ids.shape[0])]
    streams = [Place(sample, num, []).stream for num in ahead]
    noise = noise_at(streams, [ids.shape[1]] * ids.shape[0], ids.ravel())
    return temperature * noise.reshape(ids.shape)


def noise_temperature(params: SamplingParams) -> float:
    """What noise is multiplied by: the temperature, or 0 where noise decides nothing."""
    return 0.0 if params.top_k == 1 else min(params.temperature, MOST_TEMPERATURE)


def slot_of(logits: Noise, noise: Noise, ids: Ids, log_total: float, first: int) -> Slot:
    """The slot of the candidates `ids` [n]; all other tokens count without noise.

    logits, noise: [n] of the candidates. log_total: of all tokens' weights, over that of the
    largest logit. first: the drafter's choice.
    """
    (shares,) = _shares(logits[None], noise[None], np.exp([log_total]))
    order = np.argsort(-shares, kind="stable")
    return _slot(first, ids[order].tolist(), shares[order].tolist())


def _shares(logits: Noise, noise: Noise, totals: Noise) -> Noise:
    """Probabilities [slots, n] of candidates; all other tokens count without noise.

    totals: [slots] the sum of the weights of all tokens, over the weight of the largest logit. A
    slot whose logits are not numbers has 0 throughout.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        scores, top = logits + noise, logits.max(1, keepdims=True)
        others = np.maximum(totals[:, None] - np.exp(logits - top).sum(1, keepdims=True), 0.0)
        highest = np.maximum(scores.max(1, keepdims=True) - top, 0.0)
        weights = np.exp(scores - top - highest)
        shares = weights / (weights.sum(1, keepdims=True) + others * np.exp(-highest))
    return np.where(np.isfinite(shares), shares, 0.0)


def _slot(first: int | None, ids: list[int], shares: list[float]) -> Slot:
    """The slot of candidates from the most probable on, behind the drafter's choice.

    The choice has the largest probability even if filters, or the few candidates, say otherwise.
    """
    first = ids[0] if first is None else first
    others = [
        (token_id, share)
        for token_id, share in zip(ids, shares, strict=True)
        if token_id != first and share > 0.0
    ]
    return Slot([first, *(i for i, _ in others)], [shares[0], *(share for _, share in others)])
