"""Drafts from n-grams: what usually follows the last few tokens, in the target's answers and here.

No model runs. A table knows the target's answers to others; what followed in the sequence's own
text corrects it (`own_text.py`). The most probable paths are found best first, as from a block
(`branches.py`): their probability is the product along the path. For a sampled request the noise
decides that will choose the target's token, as far as it is known which tokens can win.
"""

import heapq
from math import exp

import numpy as np

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.branches import noise_of
from blockdraft.speculate.drafters.ngram_table import LONGEST, NGramTable, Successors
from blockdraft.speculate.drafters.own_text import OwnText

MAX_NODES = 8
LEAST_PROBABILITY = 0.08
"""A row of the target's forward is worth more elsewhere, or not computed at all."""


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
        tokens: list[int] = []
        parents: list[int] = []
        probabilities: list[float] = []
        # By probability: the token, its parent, and the tokens before it. Among equals the one
        # that was found first.
        waiting: list[tuple[float, int, int, int, tuple[int, ...]]] = []
        num_found = 0

        def find(parent: int, path: tuple[int, ...], above: float) -> None:
            """Let the successors of a path wait that are likely enough."""
            nonlocal num_found
            if len(path) == row.max_depth:
                return
            for token_id, probability in self._successors(sample, text, ending, path):
                if above * probability >= LEAST_PROBABILITY:
                    heapq.heappush(
                        waiting, (-above * probability, num_found, token_id, parent, path)
                    )
                    num_found += 1

        find(ROOT, (), 1.0)
        while waiting and len(tokens) < row.num_draft_tokens:
            negative, _, token_id, parent, path = heapq.heappop(waiting)
            tokens.append(token_id)
            parents.append(parent)
            probabilities.append(-negative)
            find(len(tokens) - 1, (*path, token_id), -negative)
        if not tokens:
            return NOTHING
        tree = Tree(tuple(tokens), tuple(parents))
        return Proposal(tree, tuple(probabilities), (self.kind,) * len(tokens))

    def _successors(
        self, sample: Sample, text: OwnText, ending: tuple[int, ...], path: tuple[int, ...]
    ) -> Successors:
        """What may follow behind a path, the most probable first."""
        context = (*ending, *path)[-LONGEST:]
        found = text.mixed(context, self._table.after(context))
        if len(found) >= 2 and sample.params.temperature > 0.0:
            found = _with_noise(found, sample, len(path))
        return tuple(sorted(found.items(), key=lambda one: -one[1]))

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._texts.pop(key, None)


def _with_noise(found: dict[int, float], sample: Sample, num_ahead: int) -> dict[int, float]:
    """The same tokens, weighted with the noise that will choose among them."""
    noise = noise_of(np.array([list(found)]), sample, num_ahead)[0].tolist()
    weights = [share * exp(own) for share, own in zip(found.values(), noise, strict=True)]
    # All other tokens count without noise, as in a block.
    total = sum(weights) + max(0.0, 1.0 - sum(found.values()))
    return {token_id: w / total for token_id, w in zip(found, weights, strict=True)}
