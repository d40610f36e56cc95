"""Proposals of several drafters become one tree, or its best path."""

import random

import pytest

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.speculate.merge import best_path, merge

ONE = Proposal.chain([1, 2, 3], "dflash", [0.9, 0.5, 0.1])
OTHER = Proposal.chain([1, 2, 4, 5], "lookup", [0.7, 0.6, 0.4, 0.3])


def paths(proposal: Proposal) -> dict[tuple[int, ...], tuple[float, str]]:
    """Probability and source of every path, by its tokens."""
    tree = proposal.tree
    return {
        tuple(tree.tokens[i] for i in tree.path(node)): (
            proposal.probabilities[node],
            proposal.sources[node],
        )
        for node in range(len(tree))
    }


def test_a_node_of_several_has_the_largest_probability_and_all_sources() -> None:
    assert paths(merge([ONE, OTHER], 16)) == {
        (1,): (0.9, "dflash+lookup"),
        (1, 2): (0.6, "dflash+lookup"),
        (1, 2, 4): (0.4, "lookup"),
        (1, 2, 4, 5): (0.3, "lookup"),
        (1, 2, 3): (0.1, "dflash"),
    }


def test_the_best_nodes_stay() -> None:
    merged = merge([ONE, OTHER], 3)
    assert merged.tree.tokens == (1, 2, 4)
    assert merged.probabilities == (0.9, 0.6, 0.4)


def test_what_need_not_be_merged_stays_as_it_is() -> None:
    assert merge([NOTHING, ONE], 3) == ONE
    assert merge([NOTHING], 3) == NOTHING
    assert merge([ONE], 2).tree.tokens == (1, 2)
    assert best_path([NOTHING], 3) is NOTHING


def test_the_best_path_has_the_most_expected_tokens() -> None:
    assert best_path([ONE, OTHER], 16).tree.tokens == (1, 2, 4, 5)
    assert best_path([ONE, OTHER], 2).tree.tokens == (1, 2)
    sure = Proposal.chain([8, 9], "prediction", [0.99, 0.98])
    likely = Proposal.chain([1, 2, 3, 4], "dflash", [0.6, 0.4, 0.3, 0.2])
    assert best_path([likely, sure], 16).sources == ("prediction", "prediction")


def random_proposal(draw: random.Random, name: str) -> Proposal:
    tokens, parents, probabilities = [], [], []
    for node in range(draw.randint(0, 12)):
        parent = draw.choice([ROOT, *range(node)])
        token = draw.randrange(3)
        if (parent, token) in zip(parents, tokens, strict=True):
            continue
        if parent >= len(tokens):
            continue
        above = 1.0 if parent == ROOT else probabilities[parent]
        tokens.append(token)
        parents.append(parent)
        probabilities.append(above * draw.choice([1.0, 0.5, draw.random()]))
    tree = Tree(tuple(tokens), tuple(parents))
    return Proposal(tree, tuple(probabilities), (name,) * len(tokens))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(200))
def test_merging_keeps_every_path_and_the_limits(seed: int) -> None:
    draw = random.Random(seed)
    proposals = [random_proposal(draw, name) for name in ("a", "b", "c")]
    merged = merge(proposals, 64)
    found = paths(merged)
    every = [paths(proposal) for proposal in proposals]
    assert found.keys() == {path for own in every for path in own}
    for path, (probability, source) in found.items():
        given = [own[path] for own in every if path in own]
        assert probability == max(one for one, _ in given)
        assert source.split("+") == [one for _, one in given]
    if sum(map(bool, proposals)) > 1:
        # Best first, so that the first nodes are a tree: Proposal holds the rest.
        assert list(merged.probabilities) == sorted(merged.probabilities, reverse=True)
    for num in (1, 3, 7):
        part = merge(proposals, num)
        assert len(part) == min(num, len(merged))
        assert paths(part).items() <= found.items()
        path = best_path(proposals, num)
        assert path.tree.is_chain
        assert len(path) <= num
        assert paths(path).items() <= found.items()
        expected = [
            sum(found[way[:depth]][0] for depth in range(1, len(way) + 1))
            for way in found
            if len(way) <= num
        ]
        assert sum(path.probabilities) == pytest.approx(max(expected, default=0.0))
