"""The candidates of all rows of a step in one order. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from blockdraft.core.plan import Proposal
from blockdraft.core.sequence import Row


@dataclass(frozen=True, slots=True)
class Order:
    """Candidates of all rows, in the order in which they are taken.

    rows, nodes: of which row each is, and which node of its proposal. gains: the probability of
    each. branches: seconds that each adds because it begins a branch. num_forced: the first so many
    are taken in any case.
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

    num_tokens: that the sequence had. gains, branches: of the candidates, as in an order.
    """

    proposal: Proposal
    num_tokens: int
    gains: list[float]
    branches: list[float]


def by_key(rows: Sequence[Row], free: Sequence[Proposal], order: Order) -> dict[int, FreeProposal]:
    """What `order` has of each row's free proposal, by the key of its sequence."""
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
    """Those that are verified in any case, then by probability.

    For each row: what is proposed, the probability of each node, what another branch costs, and how
    many nodes of the first path are forced.
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
        sum(not is_free for is_free, *_ in found),
    )


def _branches(
    proposals: Sequence[Proposal],
    branch_seconds: Sequence[float],
    rows: Sequence[int],
    nodes: Sequence[int],
) -> Iterator[float]:
    """What each adds because another child of its parent is verified already."""
    parents: set[tuple[int, int]] = set()
    for row, node in zip(rows, nodes, strict=True):
        parent = (row, proposals[row].tree.parents[node])
        yield branch_seconds[row] if parent in parents else 0.0
        parents.add(parent)
