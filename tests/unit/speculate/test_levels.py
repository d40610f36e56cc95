"""Trees that grow level by level are the best of all trees, whatever is grown beside them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockdraft.core.errors import RequestError
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.drafters.levels import Child, Guessable, LevelGrower
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.reference import choose_row

SIZE, DEPTH = 7, 3
TABLE = 2.0 * torch.randn((SIZE,) * 4, generator=torch.Generator().manual_seed(0))
"""Logits behind the last three tokens."""


class Model:
    """Says what the table says behind each path of each row."""

    def __init__(self, rows: list[Row]) -> None:
        self.paths = [[tuple(row.sequence.token_ids)] for row in rows]
        self.num_forwards = 0

    def logits(self) -> Tensor:
        self.num_forwards += 1
        width = max(map(len, self.paths))
        found = torch.full((len(self.paths), width, SIZE), torch.nan)
        for row, paths in zip(found, self.paths, strict=True):
            for place, path in enumerate(paths):
                row[place] = TABLE[path[-3:]]
        return found

    def advance(self, levels: list[list[Child]]) -> Tensor:
        self.paths = [
            [(*paths[child.parent], child.token_id) for child in children]
            for paths, children in zip(self.paths, levels, strict=True)
        ]
        return self.logits()


def make_row(num_nodes: int, depth: int = DEPTH, start: int = 0, **options: Any) -> Row:
    params = SamplingParams(max_tokens=9, **options)
    sequence = Sequence(start, params, 7, 0, frozenset(), [start, 1, 2], 3)
    return Row(sequence, [2], num_nodes, max_depth=depth)


def grow(rows: list[Row], width: int = SIZE, **options: Any) -> tuple[LevelGrower, Model]:
    model = Model(rows)
    grower = LevelGrower(rows, Guessable(SIZE), width, **options)
    grower.grow(model.logits(), model.advance)
    return grower, model


def test_a_chain_is_the_drafters_choices() -> None:
    """Greedy and sampled, one forward for each token."""
    for options in ({}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 2}):
        row = make_row(DEPTH, **options)
        grower, model = grow([row])
        tree = grower.trees[0].proposal("fake").tree
        expected: list[int] = []
        for _ in range(DEPTH):
            scores = TABLE[tuple([0, 1, 2, *expected][-3:])].numpy().astype(np.float32)
            expected.append(choose_row(scores, Place(row.sequence, len(expected), expected)))
        assert (tree.tokens, tree.is_chain) == (tuple(expected), True)
        assert model.num_forwards == DEPTH


def all_paths() -> dict[tuple[int, ...], float]:
    """Every path, with the product of its tokens' probabilities."""
    found = {(): 1.0}
    for depth in range(DEPTH):
        for path in itertools.product(range(SIZE), repeat=depth + 1):
            shares = torch.softmax(TABLE[tuple([0, 1, 2, *path[:-1]][-3:])], 0)
            found[path] = found[path[:-1]] * float(shares[path[-1]])
    return found


@pytest.mark.parametrize("num_nodes", [DEPTH + 1, DEPTH + 5])
def test_a_tree_is_the_first_path_and_the_best_of_all_others(num_nodes: int) -> None:
    grower, _ = grow([make_row(num_nodes)])
    proposal = grower.trees[0].proposal("fake")
    tree, every = proposal.tree, all_paths()
    found = [tuple(tree.tokens[i] for i in tree.path(node)) for node in range(len(tree))]
    first = found[tree.through([])[-1]]
    chain = {first[: depth + 1] for depth in range(DEPTH)}
    others = sorted(every.keys() - chain - {()}, key=lambda path: -every[path])
    assert set(found) == chain | set(others[: num_nodes - DEPTH])
    for path, probability in zip(found, proposal.probabilities, strict=True):
        assert probability == pytest.approx(every[path], rel=1e-4)


def test_rows_grow_beside_each_other_as_alone() -> None:
    """Chains and trees of different depths, greedy and sampled; what fills up is never seen."""
    shapes = [(1, 1), (3, 3), (12, 3), (9, 2), (8, 3)]
    rows = [
        make_row(num, depth, index, temperature=float(index % 2))
        for index, (num, depth) in enumerate(shapes)
    ]
    shown: list[Tensor] = []
    together, _ = grow(rows, 4, watch=lambda rows, logits: shown.append(logits))
    assert [logits.shape for logits in shown] == [(5, 3, SIZE)]
    for row, tree in zip(rows, together.trees, strict=True):
        alone, _ = grow([row], 4)
        found, expected = tree.proposal("fake"), alone.trees[0].proposal("fake")
        assert found == expected
        assert max(found.tree.depths) <= row.num_slots
        assert len(found) == row.num_draft_tokens


class Ending:
    """A grammar that nothing follows behind two tokens of output, on any path."""

    def allowed(self, output_ids: list[int], ahead: list[int]) -> Any:
        if len(ahead) >= 2:
            raise RequestError("nothing can follow")
        return np.array([True] * (SIZE - 2) + [False] * 2)

    def num_allowed(self, output_ids: list[int], ahead: list[int]) -> int:
        return min(2, len(ahead))


def test_nothing_is_guessed_where_a_grammar_ends() -> None:
    for num_nodes in (DEPTH, 12):
        row = make_row(num_nodes)
        row.sequence.constraint = Ending()
        object.__setattr__(row.sequence.params, "grammar", "any")
        tree = grow([row])[0].trees[0].proposal("fake").tree
        assert max(tree.depths) == 2
        assert max(tree.tokens) < SIZE - 2


def test_a_drafter_that_says_nothing_proposes_no_other_tokens_than_exist() -> None:
    for bad in (torch.nan, -torch.inf, torch.inf):
        for options in ({}, {"temperature": 1.0}):
            rows = [make_row(9, **options)]
            grower = LevelGrower(rows, Guessable(SIZE), 4)

            def worthless(levels: list[list[Child]], value: float = bad) -> Tensor:
                return torch.full((1, 4, SIZE), value)

            grower.grow(worthless([]), worthless)
            tree = grower.trees[0].proposal("fake").tree
            assert all(0 <= token < SIZE for token in tree.tokens)


def test_a_part_of_the_vocabulary() -> None:
    logits = torch.arange(3.0)
    known = Guessable(SIZE, torch.tensor([1, 4, 5]))
    whole = known.over_whole_vocabulary(logits)
    assert whole.isfinite().nonzero().flatten().tolist() == [1, 4, 5]
    assert known.token(2) == 5
    shorter = Guessable(SIZE).over_whole_vocabulary(logits)
    assert shorter.isfinite().sum() == 3
