"""Trees from what a drafter thinks of each slot: its chain, and branches where it is unsure.

A block-diffusion drafter says of each slot how likely every token is, whatever stands before it
(DFlash), or behind each token that may stand there (DFlash 2). The probability of a path is the
product of those of its tokens, and the most probable paths are found best first (DDTree, arXiv
2604.12989). Where the probabilities come from: `slots.py`.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.core.plan import ROOT, Tree


@dataclass(frozen=True, slots=True)
class Slot:
    """Tokens of one depth and their probabilities, given the path before them.

    The drafter's choice comes first, then the others from the most probable on.
    """

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
