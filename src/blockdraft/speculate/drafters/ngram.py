"""Drafts from n-grams: what usually follows the last few tokens, in the target's answers and here.

No model runs. A table knows the target's answers to others; what followed in the sequence's own
text corrects it (`own_text.py`). The most probable paths are found best first, as from a block
(`branches.py`): their probability is the product along the path. For a sampled request the noise
decides that will choose the target's token, as far as it is known which tokens can win.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.branches import noise_of
from blockdraft.speculate.drafters.ngram_table import LONGEST, NGramTable
from blockdraft.speculate.drafters.own_text import OwnText

MAX_NODES = 8
LEAST_PROBABILITY = 0.08
"""A row of the target's forward is worth more elsewhere, or not computed at all."""
MOST_NOISE = 300.0

Shares = dict[int, float]
"""Numbers by token id."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A token that may be proposed.

    probability: of its whole path. index: in the order of finding; the root's is ROOT. path: the
    tokens from the anchor's successor to it.
    """

    probability: float
    index: int
    parent: int
    path: tuple[int, ...]


class NGramDrafter(ModelFree):
    """Proposes trees of the most probable paths; nothing where nothing is likely."""

    kind = "ngram"
    max_nodes = MAX_NODES

    def __init__(self, table: NGramTable) -> None:
        self._table = table
        self._texts: dict[int, OwnText] = {}

    def _propose(self, row: Row) -> Proposal:
        sample = row.sequence
        text = self._texts.setdefault(sample.key, OwnText())
        text.read(sample.token_ids)
        ending = tuple(sample.token_ids[-LONGEST:])
        found: list[_Node] = []
        best: list[_Node] = []
        newest = [_Node(1.0, ROOT, ROOT, ())]
        for depth in range(row.max_depth):
            found += self._children(sample, text, ending, newest, depth, len(found))
            # What is not among the best now never will be, nor what follows it.
            best = heapq.nsmallest(row.num_draft_tokens, found, key=_by_probability)
            newest = [node for node in best if len(node.path) == depth + 1]
            if not newest:
                break
        if not best:
            return NOTHING
        places = {node.index: place for place, node in enumerate(best)} | {ROOT: ROOT}
        tree = Tree(
            tuple(node.path[-1] for node in best), tuple(places[node.parent] for node in best)
        )
        return Proposal(tree, tuple(node.probability for node in best), (self.kind,) * len(best))

    def _children(
        self,
        sample: Sample,
        text: OwnText,
        ending: tuple[int, ...],
        nodes: list[_Node],
        depth: int,
        num_found: int,
    ) -> list[_Node]:
        """The successors of nodes of one depth that are likely enough.

        num_found: nodes that were found before.
        """
        contexts = [(*ending, *node.path)[-LONGEST:] for node in nodes]
        successors = [text.mixed(context, self._table.after(context)) for context in contexts]
        if sample.params.temperature > 0.0:
            successors = _with_noise(successors, sample, depth)
        children: list[_Node] = []
        for node, following in zip(nodes, successors, strict=True):
            for token_id, share in sorted(following.items(), key=lambda one: -one[1]):
                probability = node.probability * share
                if probability < LEAST_PROBABILITY:
                    break
                index = num_found + len(children)
                children.append(_Node(probability, index, node.index, (*node.path, token_id)))
        return children

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._texts.pop(key, None)


def _by_probability(node: _Node) -> tuple[float, int]:
    """A parent comes before its children: it is no less probable, and was found before them."""
    return -node.probability, node.index


def _with_noise(successors: list[Shares], sample: Sample, depth: int) -> list[Shares]:
    """The same tokens, weighted with the noise that will choose among those of this depth."""
    several = [following for following in successors if len(following) > 1]
    if not several:
        return successors
    ids = list(dict.fromkeys(token_id for following in several for token_id in following))
    # At high temperatures the exponential of the noise is more than a number can be.
    noise = noise_of(np.array([ids]), sample, depth)[0].clip(-MOST_NOISE, MOST_NOISE)
    factors = dict(zip(ids, np.exp(noise).tolist(), strict=True))
    return [_weighted(following, factors) for following in successors]


def _weighted(following: Shares, factors: Shares) -> Shares:
    """Shares with factors, normalized; one alone stays as it is."""
    if len(following) < 2:
        return following
    weights = {token_id: share * factors[token_id] for token_id, share in following.items()}
    # All other tokens count without noise, as in a block.
    total = sum(weights.values()) + max(0.0, 1.0 - sum(following.values()))
    return {token_id: weight / total for token_id, weight in weights.items()}
