"""Trees from the marginals of a block: the drafter's chain, and branches where it is unsure.

A block-diffusion drafter says of each slot how likely every token is, whatever stands before it. So
the probability of a path is the product of those of its tokens, and the most probable paths are
found best first (DDTree, arXiv 2604.12989).

A sampled token is the target's choice under known noise, and that decides which tokens can win: the
score of a token is its logit plus temperature times its noise. Without noise that is the logit, and
so the probabilities of temperature 0 and of small ones go over into each other.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from blockdraft.core.plan import ROOT, Tree
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import noise_at

NUM_CANDIDATES = 32
"""Tokens of a slot that are looked at."""

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens of one depth, the most probable first, given the path before them."""

    token_ids: list[int]
    probabilities: list[float]


def best_first(slots: Sequence[Slot], num_nodes: int) -> tuple[Tree, tuple[float, ...]]:
    """The first tokens of all slots as one path, and the most probable other paths.

    Returns:
        a tree of at most `num_nodes`, if the path alone has no more, and the probabilities of its
        nodes, which never rise.
    """
    tokens: list[int] = []
    parents: list[int] = []
    probabilities: list[float] = []
    num_branching = num_nodes - len(slots)
    # By probability: parent, that one's probability, depth, rank, and whether it is on the path.
    # Among equals the one that was found first.
    waiting: list[tuple[float, int, int, float, int, int, bool]] = []
    num_found = 0

    def find(parent: int, above: float, depth: int, rank: int, on_path: bool) -> None:
        nonlocal num_found
        if depth < len(slots) and rank < len(slots[depth].token_ids):
            probability = above * slots[depth].probabilities[rank]
            item = (-probability, num_found, parent, above, depth, rank, on_path)
            heapq.heappush(waiting, item)
            num_found += 1

    find(ROOT, 1.0, 0, 0, True)
    while waiting:
        negative, _, parent, above, depth, rank, on_path = heapq.heappop(waiting)
        if not on_path:
            if num_branching == 0:
                continue
            num_branching -= 1
        node = len(tokens)
        tokens.append(slots[depth].token_ids[rank])
        parents.append(parent)
        probabilities.append(-negative)
        find(node, -negative, depth + 1, 0, on_path)
        find(parent, above, depth, rank + 1, False)
    return Tree(tuple(tokens), tuple(parents)), tuple(probabilities)


def slots_of(
    logits: Tensor, chain: Sequence[int], sample: Sample, vocabulary_ids: Tensor | None
) -> list[Slot]:
    """What a drafter thinks of the slots behind a sample's tokens, those of its chain first.

    logits: [slots, tokens] as the request's penalties, bias and grammar left them, at least as many
    slots as the chain has. vocabulary_ids: of these tokens; None if they are all.
    """
    logits = logits[: len(chain)].float()
    values, places = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    if not bool(values.isfinite().all()):
        logits = logits.nan_to_num_(nan=-torch.inf, posinf=torch.inf)
        values, places = logits.topk(min(NUM_CANDIDATES, logits.shape[1]))
    totals = (logits - values[:, :1]).exp_().sum(1)
    ids = (places if vocabulary_ids is None else vocabulary_ids[places]).cpu().numpy()
    found = values.cpu().numpy().astype(np.float64)
    shares = _shares(_scores(ids, found, sample), found, totals.cpu().numpy())
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


def _scores(ids: Ids, logits: NDArray[np.float64], sample: Sample) -> NDArray[np.float64]:
    """Of the tokens `ids` [slots, n]: logits and the noise that the target's choice will have."""
    params = sample.params
    if params.temperature == 0.0 or params.top_k == 1:
        return logits
    streams = [Place(sample, index, []).stream for index in range(ids.shape[0])]
    noise = noise_at(streams, [ids.shape[1]] * ids.shape[0], ids.ravel())
    return logits + params.temperature * noise.reshape(ids.shape)


def _shares(
    scores: NDArray[np.float64], logits: NDArray[np.float64], totals: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Probabilities [slots, n] of candidates; the tokens that are none count without noise.

    totals: [slots] of all tokens' weights, over the weight of the largest logit. A slot without a
    number has 0 throughout.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        top = logits[:, :1]
        others = np.maximum(totals[:, None] - np.exp(logits - top).sum(1, keepdims=True), 0.0)
        highest = np.maximum(scores.max(1, keepdims=True) - top, 0.0)
        weights = np.exp(scores - top - highest)
        shares = weights / (weights.sum(1, keepdims=True) + others * np.exp(-highest))
    return np.where(np.isfinite(shares), shares, 0.0)


def _slot(first: int, ids: list[int], shares: list[float]) -> Slot:
    """The slot of candidates from the most probable on, behind the drafter's choice.

    That comes first also where filters or few candidates hide that it is best.
    """
    others = [
        (token_id, share)
        for token_id, share in zip(ids, shares, strict=True)
        if token_id != first and share > 0.0
    ]
    return Slot([first, *(i for i, _ in others)], [shares[0], *(share for _, share in others)])
