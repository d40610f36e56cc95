"""Trees from a block: the drafter's chain, and branches where it is unsure.

A block-diffusion drafter says of each slot how likely every token is, whatever stands before it
(DFlash), or behind each token that may stand there (DFlash 2). The probability of a path is the
product of those of its tokens, and the most probable paths are found best first (DDTree, arXiv
2604.12989).

A sampled token is the target's choice under known noise, and that decides which tokens can win: the
score of a token is its logit plus temperature times its noise. Without noise that is the logit, and
so the probabilities of temperature 0 and of small ones go over into each other.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.plan import ROOT, Tree
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import Noise, noise_at
from blockdraft.speculate.sampler.philox import Ids

NUM_CANDIDATES = 32
"""Tokens of a slot that are looked at."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens of one depth, the most probable first, given the path before them."""

    token_ids: list[int]
    probabilities: list[float]


class Successors(Protocol):
    """What a drafter thinks of the tokens behind its anchor, and behind each other."""

    @property
    def max_depth(self) -> int:
        """Tokens of the longest path, which is the drafter's chain."""

    def children(self, path: Sequence[int]) -> Slot:
        """The tokens behind those of a path, the drafter's choice there first."""


@dataclass(frozen=True, slots=True)
class Marginals:
    """Slots of which none depends on the tokens before it, as those of a block are."""

    slots: Sequence[Slot]

    @property
    def max_depth(self) -> int:
        """See Successors."""
        return len(self.slots)

    def children(self, path: Sequence[int]) -> Slot:
        """See Successors."""
        return self.slots[len(path)]


@dataclass(frozen=True, slots=True)
class _Siblings:
    """The tokens behind a node: its number, the tokens up to it, and its probability."""

    slot: Slot
    parent: int
    path: tuple[int, ...]
    above: float


def best_first(successors: Successors, num_nodes: int) -> tuple[Tree, tuple[float, ...]]:
    """The path of first tokens, and the most probable other paths.

    Returns:
        a tree of at most `num_nodes`, if the path alone has no more, and the probabilities of its
        nodes, which never rise.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    num_branching = num_nodes - successors.max_depth
    # By probability: siblings, which of them, and whether it is on the path. Among equals the one
    # that was found first.
    waiting: list[tuple[float, int, _Siblings, int, bool]] = []
    num_found = 0

    def find(siblings: _Siblings, rank: int, on_path: bool) -> None:
        nonlocal num_found
        if rank < len(siblings.slot.token_ids):
            probability = siblings.above * siblings.slot.probabilities[rank]
            heapq.heappush(waiting, (-probability, num_found, siblings, rank, on_path))
            num_found += 1

    def find_children(parent: int, path: tuple[int, ...], above: float, on_path: bool) -> None:
        if len(path) < successors.max_depth:
            find(_Siblings(successors.children(path), parent, path, above), 0, on_path)

    find_children(ROOT, (), 1.0, True)
    while waiting:
        negative, _, siblings, rank, on_path = heapq.heappop(waiting)
        if not on_path:
            if num_branching == 0:
                continue
            num_branching -= 1
        node = len(tokens)
        tokens.append(siblings.slot.token_ids[rank])
        parents.append(siblings.parent)
        probabilities.append(-negative)
        find_children(node, (*siblings.path, tokens[node]), -negative, on_path)
        find(siblings, rank + 1, False)
    return Tree(tuple(tokens), tuple(parents)), tuple(probabilities)


def slots_of(
    logits: Tensor,
    chain: Sequence[int | None],
    sample: Sample,
    vocabulary_ids: Tensor | None,
    num_ahead: int = 0,
    *,
    is_one_position: bool = False,
) -> list[Slot]:
    """What a drafter thinks of the slots behind a sample's tokens, those of its chain first.

    None in the chain: the most probable token comes first.

    logits: [slots, tokens] as the request's penalties, bias and grammar left them, at least as many
    slots as the chain has. vocabulary_ids: of these tokens; None if they are all. num_ahead: tokens
    between the sample's and the first slot. is_one_position: the slots are of siblings, and all
    stand where the first one does.
    """
    logits = logits[: len(chain)].float()
    values, places = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    if not bool(values.isfinite().all()):
        logits = logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf)
        values, places = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    totals = (logits - values[:, :1]).exp_().sum(1)
    ids = (places if vocabulary_ids is None else vocabulary_ids[places]).cpu().numpy()
    found = values.cpu().numpy().astype(np.float64)
    shares = _shares(
        found,
        noise_of(ids, sample, num_ahead, is_one_position=is_one_position),
        totals.cpu().numpy().astype(np.float64),
    )
    order = np.argsort(-shares, axis=1, kind="stable")
    return [
        _slot(first, own_ids.tolist(), own_shares.tolist())
        for first, own_ids, own_shares in zip(
            chain,
            np.take_along_axis(ids, order, 1),
            np.take_along_axis(shares, order, 1),
            strict=True,
        )
    ]


def noise_of(
    ids: Ids, sample: Sample, num_ahead: int = 0, *, is_one_position: bool = False
) -> Noise:
    """What the target's choice will add to the logits of the tokens `ids` [slots, n]."""
    params = sample.params
    if params.temperature == 0.0 or params.top_k == 1:
        return np.zeros(ids.shape)
    ahead = [num_ahead + (0 if is_one_position else index) for index in range(ids.shape[0])]
    streams = [Place(sample, num, []).stream for num in ahead]
    noise = noise_at(streams, [ids.shape[1]] * ids.shape[0], ids.ravel())
    return params.temperature * noise.reshape(ids.shape)


def slot_of(logits: Noise, noise: Noise, ids: Ids, log_total: float, first: int) -> Slot:
    """The slot of the candidates `ids` [n]; the tokens that are none count without noise.

    logits, noise: [n] of the candidates. log_total: of all tokens' weights, over that of the
    largest logit. first: the drafter's choice.
    """
    (shares,) = _shares(logits[None], noise[None], np.exp([log_total]))
    order = np.argsort(-shares, kind="stable")
    return _slot(first, ids[order].tolist(), shares[order].tolist())


def _shares(logits: Noise, noise: Noise, totals: Noise) -> Noise:
    """Probabilities [slots, n] of candidates; the tokens that are none count without noise.

    totals: [slots] of all tokens' weights, over the weight of the largest logit. A slot without a
    number has 0 throughout.
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

    That comes first also where filters or few candidates hide that it is best.
    """
    first = ids[0] if first is None else first
    others = [
        (token_id, share)
        for token_id, share in zip(ids, shares, strict=True)
        if token_id != first and share > 0.0
    ]
    return Slot([first, *(i for i, _ in others)], [shares[0], *(share for _, share in others)])
