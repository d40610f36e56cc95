"""The candidates of all rows of a step in one order. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockdraft.allocation.prices import Price
from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row


@dataclass(frozen=True, slots=True)
class Order:
    """Candidates of all rows, in the order in which they are taken.

    rows, nodes: of which row each is, and which node of its proposal. gains: the tokens that each
    is expected to add, which is the probability that it is kept. branches: the seconds that each
    adds because it begins a branch. num_forced: so many, the first ones, are taken in any case.
    """

    rows: list[int]
    nodes: list[int]
    gains: list[float]
    branches: list[float]
    num_forced: int


NO_CANDIDATES = Order([], [], [], [], 0)
"""Of a step in which nothing is proposed."""


@dataclass(slots=True)
class FreeProposal:
    """What is proposed for a sequence without a model.

    num_tokens: what the sequence had then. gains, branches: of the candidates, as in an `Order`.
    """

    proposal: Proposal
    num_tokens: int
    gains: list[float]
    branches: list[float]


@dataclass(frozen=True, slots=True)
class FreeCandidates:
    """All that is proposed in a step without a model.

    by_key: for each sequence; empty where nothing was asked for, or found. order: all candidates.
    price: of the best number of them.
    """

    by_key: dict[int, FreeProposal]
    order: Order
    price: Price

    @property
    def has_any(self) -> bool:
        """False if nothing is proposed."""
        return len(self.order.nodes) > 0

    def expected_of(self, key: int) -> float:
        """Tokens that the candidates of a sequence are expected to add."""
        own = self.by_key.get(key)
        return 0.0 if own is None else sum(own.gains)


def by_key(rows: Sequence[Row], free: Sequence[Proposal], order: Order) -> dict[int, FreeProposal]:
    """The free proposal of each row, with what `order` says of it, by the key of its sequence."""
    found = [
        FreeProposal(own, len(row.sequence.token_ids), [], [])
        for row, own in zip(rows, free, strict=True)
    ]
    for index, gain, branch in zip(order.rows, order.gains, order.branches, strict=True):
        found[index].gains.append(gain)
        found[index].branches.append(branch)
    return {row.sequence.key: own for row, own in zip(rows, found, strict=True)}


def ordered(
    proposals: Sequence[Proposal],
    chances: Sequence[Sequence[float]],
    branch_seconds: Sequence[float],
    num_forced: Sequence[int],
) -> Order:
    """All candidates: first those that are verified in any case, then by probability.

    For each row: its proposal, the probability of each node, the seconds of another branch, and how
    many nodes of its first path are verified in any case.
    """
    found: list[tuple[bool, float, int, int]] = []
    for row, (proposal, own, forced) in enumerate(zip(proposals, chances, num_forced, strict=True)):
        first = set(proposal.tree.through([])[:forced]) if forced else set()
        # Among equals the earlier: a node never comes before its parent.
        found += [(node not in first, -chance, row, node) for node, chance in enumerate(own)]
    found.sort()
    rows, nodes = [item[2] for item in found], [item[3] for item in found]
    return Order(
        rows,
        nodes,
        [-item[1] for item in found],
        list(_branches(proposals, branch_seconds, rows, nodes)),
        sum(not is_optional for is_optional, *_ in found),
    )


def taken(proposals: Sequence[Proposal], order: Order, num: int) -> list[Proposal]:
    """Of each proposal the nodes that are among the first `num` of an order."""
    nodes: list[list[int]] = [[] for _ in proposals]
    for row, node in zip(order.rows[:num], order.nodes[:num], strict=True):
        nodes[row].append(node)
    return [
        proposal if len(own) == len(proposal) else proposal.only(sorted(own))
        for proposal, own in zip(proposals, nodes, strict=True)
    ]


def _branches(
    proposals: Sequence[Proposal],
    branch_seconds: Sequence[float],
    rows: Sequence[int],
    nodes: Sequence[int],
) -> Iterator[float]:
    """Of each candidate its seconds as a branch: 0 for the first child of a parent to be taken."""
    parents: set[tuple[int, int]] = set()
    for row, node in zip(rows, nodes, strict=True):
        parent = (row, proposals[row].tree.parents[node])
        yield branch_seconds[row] if parent in parents else 0.0
        parents.add(parent)
