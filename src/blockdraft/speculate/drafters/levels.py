"""Trees that a drafter grows level by level, one forward for each depth.

A drafter that reads its own tokens says behind each path how likely every token is. Of each level
the most probable nodes are expanded, by the product of the probabilities along their paths, and of
all that was found the most probable nodes are proposed (EAGLE-2, arXiv 2406.16858). The path of the
drafter's own choices is always among them. A row that may have no more candidates than a path is
long gets that path alone.

Probabilities are of the target's choice under the request's own noise, see `slots`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import nlargest

import numpy as np
import torch
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.speculate.drafters.base import Watch
from blockdraft.speculate.drafters.branches import Slot, best_first
from blockdraft.speculate.drafters.slots import Guessable, slots_of
from blockdraft.speculate.sampler.choose import Walk, argmax_ids, choose
from blockdraft.speculate.sampler.logits import Place, processed
from blockdraft.speculate.sampler.reference import NO_CHOICE

DEPTH = 7
"""Tokens of the longest path, as in the paper of EAGLE-3."""

_NOTHING_BEHIND = Slot([], [])


@dataclass(frozen=True, slots=True)
class Child:
    """A node of the next level: its parent's place in the level before, and its token."""

    parent: int
    token_id: int


Advance = Callable[[list[list[Child]]], Tensor]
"""From the next level of each row to the logits [b, nodes of the longest, n] behind its nodes."""


@dataclass(frozen=True, slots=True)
class _Node:
    """A node to expand: the tokens from below the anchor to it, and how probable they are."""

    path: tuple[int, ...]
    probability: float


class LevelTree:
    """The tree of one row while it grows; `level` are the nodes that are expanded next.

    The first of them continues the drafter's own choices, until these end. width: nodes of a level
    that are expanded, and tokens that are looked at behind each. The probabilities of a chain leave
    out penalties and grammars, which take long to apply: it has been chosen with them already.
    """

    def __init__(self, row: Row, width: int) -> None:
        self.row = row
        self.is_chain = row.num_draft_tokens <= row.num_slots
        self.has_chain = True
        self.level = [_Node((), 1.0)]
        self.max_depth = row.num_slots
        self._width = width
        self._slots: dict[tuple[int, ...], Slot] = {}
        self._found: list[float] = []
        self._along: list[Tensor] = []

    @property
    def depth(self) -> int:
        """Tokens between the anchor and the children of this level."""
        return len(self.level[0].path)

    def children(self, path: Sequence[int]) -> Slot:
        """See branches.Successors."""
        return self._slots.get(tuple(path), _NOTHING_BEHIND)

    def widen(self, slots: Sequence[Slot]) -> list[Child]:
        """Take what stands behind each node of the level; returns the level after it.

        The slot of the first node begins with the drafter's choice, if `has_chain`.
        """
        choices: list[tuple[_Node, Child]] = []
        for place, (node, slot) in enumerate(zip(self.level, slots, strict=True)):
            ids, shares = slot.token_ids[: self._width], slot.probabilities[: self._width]
            self._slots[node.path] = Slot(ids, shares)
            for token_id, share in zip(ids, shares, strict=True):
                below = _Node((*node.path, token_id), node.probability * share)
                choices.append((below, Child(place, token_id)))
        self.has_chain = self.has_chain and bool(slots[0].token_ids)
        self._found += [node.probability for node, _ in choices]
        depth, self.level = self.depth + 1, []
        if depth == self.max_depth:
            return []
        first = choices[:1] if self.has_chain else []
        others = nlargest(
            self._width - len(first), self._useful(choices[len(first) :]), key=_probability
        )
        self.level = [node for node, _ in (*first, *others)]
        return [child for _, child in (*first, *others)]

    def lengthen(self, choice: int | None, logits: Tensor) -> list[Child]:
        """The same for a chain: take the choice behind its end, and the logits [n] there."""
        path, self.level = self.level[0].path, []
        if choice is None:
            return []
        self._along.append(logits)
        if len(path) + 1 < self.max_depth:
            self.level = [_Node((*path, choice), 1.0)]
        self._slots[path] = Slot([choice], [1.0])
        return [Child(0, choice)] if self.level else []

    def rate_chain(self, guessable: Guessable) -> None:
        """Find the probabilities of a chain's nodes, all at once; see slots_of."""
        chain = [slot.token_ids[0] for slot in self._slots.values()]
        if not chain:
            return
        slots = slots_of(torch.stack(self._along), chain, self.row.sequence, guessable)
        for path, slot in zip(list(self._slots), slots, strict=True):
            self._slots[path] = Slot(slot.token_ids[:1], slot.probabilities[:1])

    def _useful(self, choices: list[tuple[_Node, Child]]) -> list[tuple[_Node, Child]]:
        """Without those whose children could never be among the nodes that are proposed."""
        best = nlargest(self.row.num_draft_tokens, self._found)
        least = best[-1] if len(best) == self.row.num_draft_tokens else 0.0
        return [each for each in choices if _probability(each) > least]

    def proposal(self, kind: str) -> Proposal:
        """The path of the drafter's choices, and the most probable other nodes."""
        tree, probabilities = best_first(self, self.row.num_draft_tokens)
        return Proposal(tree, probabilities, (kind,) * len(tree)) if len(tree) else NOTHING


def _probability(choice: tuple[_Node, Child]) -> float:
    return choice[0].probability


class LevelGrower:
    """Grows the trees of rows together.

    guessable: which tokens the logits are of. watch: is shown those along each row's first path.
    """

    def __init__(
        self, rows: list[Row], guessable: Guessable, width: int, watch: Watch | None = None
    ) -> None:
        self.trees = [LevelTree(row, width) for row in rows]
        self._rows, self._guessable, self._watch = rows, guessable, watch

    def grow(self, logits: Tensor, advance: Advance) -> None:
        """Grow all trees to their depths, from the logits [b, 1, n] behind the anchors."""
        shown: list[Tensor] = []
        while True:
            if self._watch is not None:
                shown.append(self._guessable.over_whole_vocabulary(logits[:, 0]))
            first = self._choices(logits)
            levels = [
                self._next_level(tree, own, choice) if tree.level else []
                for tree, own, choice in zip(self.trees, logits, first, strict=True)
            ]
            if not any(levels):
                break
            logits = advance(levels)
        for tree in self.trees:
            if tree.is_chain:
                tree.rate_chain(self._guessable)
        if self._watch is not None:
            self._watch(self._rows, torch.stack(shown, dim=1))

    def _next_level(self, tree: LevelTree, logits: Tensor, choice: int | None) -> list[Child]:
        if tree.is_chain:
            return tree.lengthen(choice, logits[0])
        return tree.widen(self._slots(tree, logits, choice))

    def _choices(self, logits: Tensor) -> list[int | None]:
        """The drafter's choice behind the first node of each row; None where there is none."""
        found: list[int | None] = [None] * len(self.trees)
        asked = [i for i, tree in enumerate(self.trees) if tree.level and tree.has_chain]
        samples = [self.trees[i].row.sequence for i in asked]
        greedy = [i for i, own in zip(asked, samples, strict=True) if own.params.is_greedy_argmax]
        for index, best in zip(greedy, argmax_ids(logits[greedy, 0]), strict=True):
            # Not even a broken drafter may give the target what is no token.
            found[index] = self._guessable.token(max(best, 0))
        others = [i for i in asked if i not in greedy]
        walks = []
        for index in others:
            tree = self.trees[index]
            place = Place(tree.row.sequence, tree.depth, tree.level[0].path)
            whole = self._guessable.over_whole_vocabulary(logits[index, :1])
            walks.append(Walk(whole, tree.row.sequence, [place]))
        for index, choice_at in zip(others, choose(walks), strict=True):
            # Behind a place where a grammar cannot be followed there is nothing to guess.
            with suppress(RequestError):
                choice = choice_at(0)
                found[index] = 0 if choice == NO_CHOICE else choice
        return found

    def _slots(self, tree: LevelTree, logits: Tensor, choice: int | None) -> list[Slot]:
        """What stands behind each node of a tree's level, from logits [at least so many, n]."""
        sample, nodes = tree.row.sequence, tree.level
        logits, guessable = logits[: len(nodes)], self._guessable
        if tree.has_chain and choice is None and len(nodes) == 1:
            return [_NOTHING_BEHIND]
        goes_on = [True] * len(nodes)
        if sample.params.changes_logits:
            logits, goes_on = self._changed(sample, nodes, logits)
            guessable = Guessable(guessable.vocab_size)
        firsts = [choice if tree.has_chain else None, *[None] * (len(nodes) - 1)]
        slots = slots_of(logits, firsts, sample, guessable, tree.depth, is_one_position=True)
        if tree.has_chain:
            goes_on[0] = choice is not None
        return [s if goes else _NOTHING_BEHIND for s, goes in zip(slots, goes_on, strict=True)]

    def _changed(
        self, sample: Sample, nodes: Sequence[_Node], logits: Tensor
    ) -> tuple[Tensor, list[bool]]:
        """Logits [nodes, V] as the request leaves them, and where anything may follow at all."""
        whole = self._guessable.over_whole_vocabulary(logits).float().cpu().numpy()
        goes_on = [True] * len(nodes)
        found = []
        for index, (own, node) in enumerate(zip(whole, nodes, strict=True)):
            try:
                found.append(processed(own, Place(sample, len(node.path), node.path)))
            except RequestError:
                found.append(own)
                goes_on[index] = False
        return torch.from_numpy(np.stack(found)), goes_on
