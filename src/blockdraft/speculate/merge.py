"""Proposals of several drafters for one row become one."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree

_JOINED = "+"


@dataclass(slots=True)
class _Node:
    """A node of the common trie; `place` is its index there, `parent` that of its parent."""

    place: int
    parent: int
    token_id: int
    depth: int
    probability: float
    sources: list[str]


def merge(proposals: Sequence[Proposal], num_nodes: int) -> Proposal:
    """The `num_nodes` most probable nodes of all proposals, in one tree.

    A node of several proposals has the largest of their probabilities, and all their sources.
    """
    # A node is at least as probable as its children, and stands before those that equal it.
    nodes = _trie(proposals)
    best = sorted(nodes, key=lambda node: (-node.probability, node.depth, node.place))
    return _proposal(best[:num_nodes])


def best_path(proposals: Sequence[Proposal], num_nodes: int) -> Proposal:
    """Of all paths of the proposals, the one of which the most tokens are expected to be kept.

    For targets and settings that verify chains only. It has at most `num_nodes` nodes.
    """
    nodes = _trie(proposals)
    expected: list[float] = []
    for node in nodes:
        before = 0.0 if node.parent == ROOT else expected[node.parent]
        expected.append(before + node.probability)
    within = [node for node in nodes if node.depth <= num_nodes]
    if not within:
        return NOTHING
    last = max(within, key=lambda node: expected[node.place])
    path = [last]
    while path[-1].parent != ROOT:
        path.append(nodes[path[-1].parent])
    return _proposal(path[::-1])


def sources_of(name: str) -> list[str]:
    """The drafters that a node's source names."""
    return name.split(_JOINED)


def _trie(proposals: Sequence[Proposal]) -> list[_Node]:
    """The nodes of all proposals, those with the same path once; parents stand first."""
    nodes: list[_Node] = []
    known: dict[tuple[int, int], int] = {}
    for proposal in proposals:
        place = {ROOT: ROOT}
        tree = proposal.tree
        for index, (token_id, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            above = place[parent]
            probability = proposal.probabilities[index]
            at = known.get((above, token_id))
            if at is None:
                at = known[above, token_id] = len(nodes)
                depth = tree.depths[index]
                nodes.append(_Node(at, above, token_id, depth, probability, []))
            nodes[at].probability = max(nodes[at].probability, probability)
            nodes[at].sources += [
                one for one in sources_of(proposal.sources[index]) if one not in nodes[at].sources
            ]
            place[index] = at
    return nodes


def _proposal(nodes: Sequence[_Node]) -> Proposal:
    """The proposal of nodes in this order; the parent of each stands before it."""
    place = {ROOT: ROOT} | {node.place: index for index, node in enumerate(nodes)}
    return Proposal(
        Tree(
            tuple(node.token_id for node in nodes),
            tuple(place[node.parent] for node in nodes),
        ),
        tuple(node.probability for node in nodes),
        tuple(_JOINED.join(node.sources) for node in nodes),
    )
