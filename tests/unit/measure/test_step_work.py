"""Rows of a target's forward, and what they were for."""

import pytest

from blockdraft.core.plan import ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.recorder import Work
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.measure.phases import PhaseTimer
from blockdraft.measure.step_work import RowWork, lines_of, record_step, rows_work
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.verify import Verdict


def output(num_kept, num_accepted, num_drafted=5):
    proposal = Proposal.chain([7] * num_drafted, "test")
    verdict = Verdict([7] * num_kept, list(range(num_accepted)))
    return StepOutput(0, verdict, num_kept, proposal)


def decoding(num_drafted, num_keys=100):
    return RowWork(False, 1 + num_drafted, 1 + num_drafted, num_keys)


@pytest.mark.parametrize(
    ("num_drafted", "num_kept", "num_accepted", "expected"),
    [
        (5, 4, 3, (3, 1, 2)),  # three guesses, the bonus, two rows behind the wrong guess
        (5, 6, 5, (5, 1, 0)),  # all guesses
        (5, 1, 0, (0, 1, 5)),  # none
        (0, 1, 0, (0, 1, 0)),  # plain decoding
        (5, 2, 4, (2, 0, 4)),  # a stop among the accepted: no bonus is left
        (5, 0, 0, (0, 0, 6)),  # no choice could be made
    ],
)
def test_rows_of_a_block_are_accepted_bonus_or_wasted(
    num_drafted, num_kept, num_accepted, expected
):
    lines = lines_of(decoding(num_drafted), output(num_kept, num_accepted, num_drafted))
    assert tuple(lines.values()) == expected
    assert list(lines) == ["accepted", "bonus", "wasted"]
    assert sum(expected) == 1 + num_drafted


def test_rows_of_a_prompt_are_prefill():
    assert lines_of(RowWork(True, 40, 1, 40), output(1, 0)) == {"prefill": 40}


TREE = Tree((5, 6, 7, 8, 9), (-1, -1, 1, 1, 3))
"""Nodes 1 and 3 are second children."""


@pytest.mark.parametrize(
    ("nodes", "num_kept", "expected"),
    [
        ([1, 3, 4], 4, {"accepted": 3, "bonus": 1, "wasted": 2}),  # both second children were right
        ([1, 2], 3, {"accepted": 2, "bonus": 1, "siblings": 1, "wasted": 2}),
        ([0], 2, {"accepted": 1, "bonus": 1, "siblings": 2, "wasted": 2}),
        ([], 1, {"accepted": 0, "bonus": 1, "siblings": 2, "wasted": 3}),
        ([1, 3, 4], 2, {"accepted": 2, "bonus": 0, "wasted": 4}),  # a stop on the way
    ],
)
def test_rows_of_a_tree_that_only_stood_beside_are_siblings(nodes, num_kept, expected):
    params = SamplingParams(max_tokens=8)
    sequence = Sequence(0, params, 0, 0, frozenset(), [1] * 11, num_prompt=10, num_cached=10)
    proposal = Proposal(TREE, (1.0,) * len(TREE), ("test",) * len(TREE))
    (rows,) = rows_work(ForwardPlan([PlannedRow(Row(sequence, [1], 5), proposal)]))
    assert rows == RowWork(False, 6, 6, 14, num_siblings=2)  # the deepest path has three nodes
    verdict = Verdict([7] * (1 + len(nodes)), nodes)
    assert lines_of(rows, StepOutput(0, verdict, num_kept, proposal)) == expected
    assert sum(expected.values()) == rows.num_rows


def test_a_step_of_many_shares_its_forwards_by_rows():
    timer = PhaseTimer(clock=lambda: 0)
    planned = [decoding(3, num_keys=50), RowWork(True, 12, 1, 12), decoding(0, num_keys=30)]
    record_step(timer, planned, [output(2, 1), output(1, 0), output(1, 0)], num_forwards=2)
    work = timer.take_totals().work
    of_all = 4 + 12 + 1
    assert work["accepted"] == Work(1, 1, 50, 50 / 4, 2 * 1 / of_all)
    assert work["wasted"] == Work(2, 2, 100, 50 / 2, 2 * 2 / of_all)
    assert work["bonus"].rows == work["bonus"].sequences == 2
    assert work["bonus"].pairs == 50 + 30
    assert work["prefill"] == Work(12, 1, 144, 12, pytest.approx(2 * 12 / of_all), 1)
    assert sum(one.forwards for one in work.values()) == pytest.approx(2)
    assert sum(one.keys for one in work.values()) == pytest.approx(50 + 12 + 30)
    assert work["choose"].head_rows == 4 + 1 + 1
    assert work["commit"].rows == work["stream"].rows == 4


def test_planned_rows_are_those_of_the_batch():
    params = SamplingParams(max_tokens=8)
    whole = Sequence(0, params, 0, 0, frozenset(), token_ids=[1] * 30, num_prompt=30)
    begun = Sequence(1, params, 0, 0, frozenset(), token_ids=[1] * 11, num_prompt=10)
    begun.num_cached = 10
    batch = [Row(whole, [1] * 20, 0, is_prompt=True), Row(begun, [1], 3)]
    assert rows_work(ForwardPlan.of_chains(batch, [[], [4, 5]])) == [
        RowWork(True, 20, 0, 20),  # the prompt goes on in the next step: no logits are wanted
        RowWork(False, 3, 3, 13),
    ]
