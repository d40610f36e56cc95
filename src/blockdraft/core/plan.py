"""Trees of candidate tokens, and what one pass of the target verifies. No tensors here.

A chain, as a block-diffusion drafter fills it, is a tree without branches; plain decoding and
prompts are plans without candidates.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from blockdraft.core.sequence import Row

ROOT = -1
"""The parent of the nodes right under the anchor."""


@dataclass(frozen=True)
class Tree:
    """Candidate tokens under an anchor.

    Node `i` is the token `tokens[i]` behind its parent `parents[i]`, an earlier node or ROOT.
    Siblings hold different tokens, so a walk by tokens is unique.

    Raises:
        ValueError: parents do not stand before their children, or siblings hold the same token.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens have {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} stands before its parent {parent}")
        if len(self._child_of) < len(self.tokens):
            raise ValueError("siblings hold the same token")

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _child_of(self) -> dict[tuple[int, int], int]:
        """Nodes by their parent and token."""
        pairs = zip(self.parents, self.tokens, strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; those right under the anchor have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Of each node among its siblings, in their order; the first has rank 0."""
        num_children: dict[int, int] = {}
        ranks: list[int] = []
        for parent in self.parents:
            ranks.append(num_children.get(parent, 0))
            num_children[parent] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def is_chain(self) -> bool:
        """True if every node is the only child of the one before it."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def leaves(self) -> list[int]:
        """Nodes without children, in their order."""
        inner = set(self.parents)
        return [node for node in range(len(self)) if node not in inner]

    @cached_property
    def runs(self) -> list[list[int]]:
        """All nodes from path to path, each path without what an earlier one has.

        The first is the one that always goes on with the first child, empty if there are no nodes.
        Others begin below a node of an earlier one, or right under the anchor.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        runs: list[list[int]] = [[]]
        waiting, last = children.get(ROOT, [])[::-1], ROOT
        while waiting:
            node = waiting.pop()
            if self.parents[node] == last:
                runs[-1].append(node)
            else:
                runs.append([node])
            waiting += children.get(node, [])[::-1]
            last = node
        return runs

    @cached_property
    def order(self) -> list[int]:
        """Of each node its place when all are taken run by run."""
        places = [0] * len(self)
        for place, node in enumerate(node for run in self.runs for node in run):
            places[node] = place
        return places

    def child(self, node: int, token_id: int) -> int | None:
        """The child of `node` that holds a token, None if there is none."""
        return self._child_of.get((node, token_id))

    def first_child(self, node: int) -> int | None:
        """The most probable child of `node`, None for a leaf."""
        return next((i for i, parent in enumerate(self.parents) if parent == node), None)

    def through(self, nodes: Sequence[int]) -> list[int]:
        """A path from the anchor, and on from it by first children down to a leaf."""
        if not nodes:
            return list(self.runs[0])  # several times a step: runs are found once
        path = list(nodes)
        while (child := self.first_child(path[-1])) is not None:
            path.append(child)
        return path

    def path(self, node: int) -> list[int]:
        """The nodes from right under the anchor to `node`; none for ROOT."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]


NO_NODES = Tree((), ())
"""Nothing to verify."""


@dataclass(frozen=True)
class Proposal:
    """What drafters propose for one row: a tree, its nodes from the most probable on.

    probabilities: that the target will choose exactly the path to each node, the request's noise
    included; they never rise along a path, so the first k nodes are a tree for every k. sources:
    the kinds of drafters that proposed each node.

    Raises:
        ValueError: a node is believed to be likelier than its parent.
    """

    tree: Tree
    probabilities: tuple[float, ...]
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.tree) == len(self.probabilities) == len(self.sources):
            raise ValueError(
                f"{len(self.tree)} nodes have {len(self.probabilities)} probabilities and "
                f"{len(self.sources)} sources"
            )
        for node, parent in enumerate(self.tree.parents):
            above = 1.0 if parent == ROOT else self.probabilities[parent]
            if not 0.0 <= self.probabilities[node] <= above:
                raise ValueError(
                    f"node {node} has the probability {self.probabilities[node]}, and the path to "
                    f"it {above}"
                )

    @classmethod
    def chain(
        cls, tokens: Sequence[int], source: str, probabilities: Sequence[float] | None = None
    ) -> "Proposal":
        """One path. Without probabilities of its own every node counts as certain."""
        tree = Tree(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))
        if probabilities is None:
            probabilities = (1.0,) * len(tokens)
        return cls(tree, tuple(probabilities), (source,) * len(tokens))

    def __len__(self) -> int:
        return len(self.tree)

    def only(self, nodes: Sequence[int]) -> "Proposal":
        """These nodes, in rising order, each with its parent among them.

        Raises:
            ValueError: a parent is missing.
        """
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
        parents = [self.tree.parents[node] for node in nodes]
        missing = [parent for parent in parents if parent not in place]
        if missing:
            raise ValueError(f"the parent {missing[0]} of a node is left out")
        return Proposal(
            Tree(
                tuple(self.tree.tokens[node] for node in nodes),
                tuple(place[parent] for parent in parents),
            ),
            tuple(self.probabilities[node] for node in nodes),
            tuple(self.sources[node] for node in nodes),
        )

    def first_chain(self) -> "Proposal":
        """The path that always goes on with the first child: what takes no trees verifies."""
        return self.only(self.tree.through([]))


NOTHING = Proposal(NO_NODES, (), ())
"""The proposal of a row that is decoded plainly, or whose prompt goes in."""


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """One sequence's share of a pass: committed tokens that go in, and candidates behind them.

    Its positions in the pass are those of `row.new_ids`, then the nodes of the tree in their order.
    """

    row: Row
    proposal: Proposal = NOTHING

    @property
    def tree(self) -> Tree:
        """The candidates."""
        return self.proposal.tree

    @property
    def token_ids(self) -> list[int]:
        """Of all positions."""
        return [*self.row.new_ids, *self.tree.tokens]

    @property
    def num_positions(self) -> int:
        """Tokens that the target computes, a node shared by several leaves once."""
        return len(self.row.new_ids) + len(self.tree)

    @property
    def num_keys(self) -> int:
        """Tokens that the deepest position attends to."""
        depth = max(self.tree.depths, default=0)
        return self.row.sequence.num_cached + len(self.row.new_ids) + depth

    @property
    def num_choices(self) -> int:
        """Positions at which a token is chosen: the anchor and the nodes, the last of the row."""
        return 1 + len(self.tree) if self.row.is_complete else 0

    @property
    def num_logits(self) -> int:
        """Positions whose logits are needed, the last ones of the row."""
        return self.num_positions if self.row.sequence.is_scoring else self.num_choices

    def kept_positions(self, nodes: Sequence[int]) -> list[int]:
        """The row's positions of the new tokens and of a path of nodes."""
        num_new = len(self.row.new_ids)
        return [*range(num_new), *(num_new + node for node in nodes)]


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """What one pass of the target computes, row by row."""

    rows: list[PlannedRow] = field(default_factory=list)

    @classmethod
    def of_chains(cls, rows: Sequence[Row], drafts: Sequence[Sequence[int]]) -> "ForwardPlan":
        """Each row with one path of given tokens."""
        return cls(
            [
                PlannedRow(row, Proposal.chain(draft, "given"))
                for row, draft in zip(rows, drafts, strict=True)
            ]
        )

    def __iter__(self) -> Iterator[PlannedRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def wants_features(self) -> bool:
        """True if a drafter may ask for the features of some row."""
        return any(planned.row.sequence.may_draft for planned in self.rows)
