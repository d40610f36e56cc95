"""Trees of candidates, and the rows of a pass that verifies them."""

import random

import pytest

from blockdraft.core.plan import (
    NO_NODES,
    NOTHING,
    ROOT,
    ForwardPlan,
    PlannedRow,
    Proposal,
    Tree,
)
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence

#     anchor -> 5 -> 7 -> 9
#            |    -> 8
#            -> 6 -> 7
BRANCHED = Tree((5, 6, 7, 7, 8, 9), (ROOT, ROOT, 0, 1, 0, 2))


def row(num_prompt=4, chunk=None, **params):
    sequence = Sequence(0, SamplingParams(**params), 0, 0, frozenset(), list(range(num_prompt)), 4)
    return Row(sequence, sequence.token_ids[:chunk], 8)


def test_a_tree_knows_its_paths():
    assert BRANCHED.depths == (1, 1, 2, 2, 2, 3)
    assert BRANCHED.ranks == (0, 1, 0, 0, 1, 0)
    assert BRANCHED.leaves == [3, 4, 5]
    assert [BRANCHED.path(leaf) for leaf in BRANCHED.leaves] == [[1, 3], [0, 4], [0, 2, 5]]
    assert BRANCHED.path(ROOT) == []
    assert BRANCHED.child(ROOT, 6) == 1
    assert BRANCHED.child(1, 7) == 3
    assert BRANCHED.child(1, 8) is None
    assert not BRANCHED.is_chain


def test_a_path_goes_on_with_first_children():
    assert NO_NODES.through([]) == []
    assert BRANCHED.through([]) == [0, 2, 5]
    assert BRANCHED.through([1]) == [1, 3]
    draw = random.Random(0)
    for _ in range(50):
        tree = Tree(tuple(range(12)), tuple(draw.randrange(ROOT, node) for node in range(12)))
        path, node = [], ROOT
        while (node := tree.first_child(node)) is not None:
            path.append(node)
        assert tree.through([]) == path
        tree.through([]).clear()  # everybody gets a list of their own
        assert tree.through([]) == tree.through(path[:1]) == path


def test_a_chain_is_a_tree_without_branches():
    chain = Proposal.chain([4, 4, 2], "dflash", (0.9, 0.5, 0.5))
    assert chain.tree.is_chain
    assert chain.tree.leaves == [2]
    assert chain.tree.depths == (1, 2, 3)
    assert chain.sources == ("dflash",) * 3
    assert NO_NODES.is_chain
    assert len(NOTHING) == 0


@pytest.mark.parametrize(
    ("tokens", "parents", "reason"),
    [
        ((1, 2), (ROOT,), "2 tokens have 1 parents"),
        ((1, 2), (1, ROOT), "node 0 stands before its parent 1"),
        ((1, 2), (ROOT, -2), "node 1 stands before its parent -2"),
        ((1, 1), (ROOT, ROOT), "siblings hold the same token"),
    ],
)
def test_what_is_no_tree_is_refused(tokens, parents, reason):
    with pytest.raises(ValueError, match=reason):
        Tree(tokens, parents)


def test_a_node_is_no_likelier_than_its_path():
    with pytest.raises(ValueError, match=r"node 1 has the probability 0.6, and the path to it 0.5"):
        Proposal(Tree((1, 2), (ROOT, 0)), (0.5, 0.6), ("a", "a"))
    with pytest.raises(ValueError, match="2 nodes have 1 probabilities"):
        Proposal(Tree((1, 2), (ROOT, 0)), (0.5,), ("a", "a"))


def test_the_first_nodes_of_a_proposal_are_a_tree():
    draw = random.Random(0)
    for _ in range(50):
        parents, probabilities = [], []
        for node in range(12):
            parent = draw.randrange(ROOT, node)
            above = 1.0 if parent == ROOT else probabilities[parent]
            parents.append(parent)
            probabilities.append(above * draw.random())
        order = sorted(range(12), key=lambda node: -probabilities[node])
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(order)}
        tree = Tree(tuple(order), tuple(place[parents[node]] for node in order))
        proposal = Proposal(tree, tuple(sorted(probabilities, reverse=True)), ("a",) * 12)
        for num in range(13):
            assert proposal.only(range(num)).tree.tokens == tree.tokens[:num]


def test_nodes_are_left_out_with_what_hangs_on_them():
    proposal = Proposal(BRANCHED, (0.9, 0.8, 0.7, 0.6, 0.5, 0.4), tuple("abcdef"))
    kept = proposal.only([0, 2, 4])
    assert kept.tree == Tree((5, 7, 8), (ROOT, 0, 0))
    assert kept.probabilities == (0.9, 0.7, 0.5)
    assert kept.sources == ("a", "c", "e")
    with pytest.raises(ValueError, match="the parent 0 of a node is left out"):
        proposal.only([2])
    chain = proposal.first_chain()
    assert chain.tree == Tree((5, 7, 9), (ROOT, 0, 1))


def test_a_row_counts_its_positions_choices_and_logits():
    proposal = Proposal(BRANCHED, (1.0,) * 6, ("a",) * 6)
    anchor = PlannedRow(row(), proposal)
    assert anchor.token_ids == [0, 1, 2, 3, 5, 6, 7, 7, 8, 9]
    assert (anchor.num_positions, anchor.num_choices, anchor.num_logits) == (10, 7, 7)
    assert anchor.kept_positions([0, 2, 5]) == [0, 1, 2, 3, 4, 6, 9]
    chunk = PlannedRow(row(chunk=2))
    assert (chunk.num_positions, chunk.num_choices, chunk.num_logits) == (2, 0, 0)
    scored = PlannedRow(row(chunk=2, logprobs=0, prompt_logprobs=True))
    assert scored.num_logits == 2
    assert ForwardPlan([anchor, chunk]).wants_features
    assert not ForwardPlan([PlannedRow(row(num_draft_tokens=0))]).wants_features
