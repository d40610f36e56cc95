"""Nothing is proposed that the target cannot keep, whoever proposes it."""

from collections.abc import Sequence as Rows
from typing import Any

import pytest

from blockdraft.core.plan import NOTHING, ROOT, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.proposer import Proposer

STOP = 9
TREE = Proposal(
    Tree((1, STOP, 2, 3, STOP, 4), (ROOT, ROOT, 0, 1, 2, 4)),
    (0.5, 0.4, 0.3, 0.3, 0.2, 0.1),
    ("fixed",) * 6,
)
"""1 - 2 - STOP - 4, and STOP - 3."""


class Fixed(ModelFree):
    """Proposes TREE to everyone."""

    kind = "fixed"
    max_nodes = 6

    def propose(self, rows: Rows[Row]) -> list[Proposal]:
        return [TREE for _ in rows]


def proposed(*, by_model: bool, **params: Any) -> Proposal:
    sample = Sequence(0, SamplingParams(**params), 0, 0, frozenset({STOP}), [5, 6], 1, num_cached=1)
    row = Row(sample, [6], 6)
    if by_model:
        return Proposer(Fixed(), 20).propose([row], [NOTHING])[0]
    proposer = Proposer(NoDrafter(), 20, [Fixed()])
    proposer.joins_trees = True
    return proposer.propose_free([row])[0]


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize(
    ("params", "nodes"),
    [
        ({}, [0, 1, 2, 4]),
        ({"min_tokens": 1}, [0, 1, 2, 4]),  # of which one is there
        ({"min_tokens": 2}, [0, 2, 4]),
        ({"min_tokens": 3}, [0, 2, 4]),
        ({"min_tokens": 4}, [0, 2]),
        ({"logit_bias": {2: -100.0}}, [0, 1]),
        ({"logit_bias": {2: -99.0, 7: -100.0}}, [0, 1, 2, 4]),
        ({"logit_bias": {1: -100.0}, "min_tokens": 2}, []),
    ],
)
def test_what_cannot_be_kept_is_not_proposed(
    by_model: bool, params: dict[str, Any], nodes: list[int]
) -> None:
    assert proposed(by_model=by_model, **params) == TREE.only(nodes)


def test_what_can_be_kept_is() -> None:
    sample = Sequence(0, SamplingParams(), 0, 0, frozenset({STOP + 1}), [5, 6], 1, num_cached=1)
    (found,) = Proposer(Fixed(), 20).propose([Row(sample, [6], 6)], [NOTHING])
    assert found is TREE
