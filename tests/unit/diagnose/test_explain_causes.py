"""Every rejection gets one cause, and the right one: held against the tables that made it."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from blockdraft.core.grammar import Grammar
from blockdraft.core.request import SamplingParams
from blockdraft.diagnose.explain.cause import SURE
from blockdraft.diagnose.explain.round import CAUSES, Round
from blockdraft.engine.engine import Engine
from tests.explain_fakes import VOCAB_SIZE, TellingDrafter, like_target, num_rejections, record
from tests.fakes import AlwaysWrongDrafter, RandomDrafter, TableTarget

PROMPT = (1, 2, 3)
GREEDY = SamplingParams(max_tokens=200)
SAMPLED = SamplingParams(max_tokens=200, temperature=0.9, seed=5)
UNSAYABLE = frozenset(range(0, VOCAB_SIZE, 7))


def make_engine(*, wrong=1.0, unsayable=(), sharpness=1.0):
    target = TableTarget.random(VOCAB_SIZE, seed=3)
    target.table *= sharpness
    drafter = like_target(target, num_slots=4, wrong=wrong, seed=4)
    return Engine(target, TellingDrafter(drafter.table, unsayable))


def expected_cause(engine, one: Round, output_ids, params):
    """Computed from the tables, without logits that were recorded, and without the choice rule."""
    token_ids = [*PROMPT, *output_ids]
    place = len(PROMPT) + one.start + one.rejection.slot
    wanted = token_ids[place]
    target = engine.target.table[token_ids[place - 2], token_ids[place - 1]]
    anchor = token_ids[len(PROMPT) + one.start - 1]
    drafter = engine.drafter.table[one.rejection.slot, anchor]
    if drafter[wanted] == -torch.inf:
        return "vocabulary"
    if params.temperature > 0 and target.argmax() == drafter.argmax():
        return "noise"
    is_sure = target.softmax(0).max() >= SURE
    return "drafter_wrong" if is_sure else "target_uncertain"


def check_causes(engine, params):
    """The causes of a run, each the one that the tables tell, as many as the engine rejected."""
    rounds, outputs = record(engine, params, PROMPT)
    output_ids = [token_id for one in rounds for token_id in one.token_ids]
    assert output_ids == [token_id for output in outputs for token_id in output.token_ids]
    causes = [one.rejection.cause for one in rounds if one.rejection is not None]
    assert len(causes) == num_rejections(outputs)
    for one in rounds:
        if one.rejection is not None:
            assert one.rejection.cause == expected_cause(engine, one, output_ids, params)
    return set(causes)


@pytest.mark.parametrize(
    ("params", "sharpness", "unsayable", "expected"),
    [
        (GREEDY, 1.0, (), {"target_uncertain", "drafter_wrong"}),
        (GREEDY, 1.0, UNSAYABLE, {"target_uncertain", "drafter_wrong", "vocabulary"}),
        (SAMPLED, 1.0, (), {"target_uncertain", "drafter_wrong", "noise"}),
        (SAMPLED, 0.1, UNSAYABLE, {"target_uncertain", "noise", "vocabulary"}),
    ],
)
def test_each_rejection_has_the_cause_that_the_tables_tell(params, sharpness, unsayable, expected):
    assert check_causes(make_engine(unsayable=unsayable, sharpness=sharpness), params) == expected


@pytest.mark.parametrize("cause", ["noise", "target_uncertain", "drafter_wrong", "vocabulary"])
def test_a_planted_misattribution_is_noticed(cause):
    with (
        patch("blockdraft.diagnose.explain.record.find_cause", lambda slot, evidence: cause),
        pytest.raises(AssertionError),
    ):
        check_causes(make_engine(unsayable=UNSAYABLE), SAMPLED)


def test_a_planted_threshold_is_noticed():
    with (
        patch("blockdraft.diagnose.explain.cause.SURE", 0.1),
        pytest.raises(AssertionError),
    ):
        check_causes(make_engine(), GREEDY)


def rows(*rows_of_logits):
    """One row of logits for every state: a target or a drafter that always thinks the same."""
    return torch.tensor(rows_of_logits)


def constant_engine(target_row, drafter_row, num_slots=1):
    size = len(target_row)
    target = TableTarget(rows(target_row).expand(size, size, size).clone())
    return Engine(target, TellingDrafter(rows(drafter_row).expand(num_slots, size, size).clone()))


def first_rejection(engine, params, prompt=(1, 2), **options):
    rounds, _ = record(engine, params, prompt, **options)
    return next(one.rejection for one in rounds if one.rejection is not None)


PARTED = ([5.0, 4.9, 0.0, -1.0], [5.0, 1.0, 0.0, -1.0])
"""Target and drafter agree on token 0, and disagree where it is a little less likely."""


@pytest.mark.parametrize(
    "changes",
    [
        {"logit_bias": {0: -1.0}},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 2.0},
        {"logit_bias": {0: -1.0}, "temperature": 0.001, "seed": 1},
    ],
)
def test_what_only_a_penalty_parts_is_told(changes):
    params = SamplingParams(max_tokens=12, **changes)
    rejection = first_rejection(constant_engine(*PARTED), params, (2, 3))
    assert rejection.cause == "penalty"
    assert (rejection.drafted_id, rejection.evidence.wanted_id) == (0, 1)
    # With other penalties at work, those that part nothing are not blamed.
    apart = ([5.0, 9.0, 0.0, -1.0], [5.0, 1.0, 0.0, -1.0])
    unblamed = first_rejection(constant_engine(*apart), SamplingParams(logit_bias={2: -1.0}))
    assert unblamed.cause == "drafter_wrong"


def test_a_minimum_length_parts_too():
    # Token 3 ends the answer; both want it, and where it is forbidden they differ.
    engine = constant_engine([0.0, 4.0, 3.9, 5.0], [0.0, 3.0, 3.9, 5.0])
    params = SamplingParams(max_tokens=8, min_tokens=6)
    rounds, _ = record(engine, params, (1, 2), eos_ids=frozenset({3}))
    causes = [one.rejection.cause for one in rounds if one.rejection is not None]
    assert set(causes) == {"penalty"}
    assert rounds[-1].token_ids[-1] == 3


class Never:
    """A grammar that never allows one token."""

    def __init__(self, token_id, vocab_size):
        self.mask = np.arange(vocab_size) != token_id

    def allowed(self, output_ids, ahead):
        return self.mask


def test_a_grammar_parts_too():
    # Both want token 0; where it is forbidden, the one goes on with 1 and the other with 2.
    params = SamplingParams(max_tokens=8, grammar=Grammar.regex("any"))
    engine = constant_engine([5.0, 4.9, 0.0, -1.0], [5.0, -2.0, 0.0, -1.0])
    rounds, _ = record(engine, params, (1, 2), constraint=Never(0, 4))
    found = {one.rejection for one in rounds if one.rejection is not None}
    assert {(one.cause, one.drafted_id, one.evidence.wanted_id) for one in found} == {
        ("penalty", 2, 1)
    }
    # A token that nobody wanted parts nothing.
    rounds, _ = record(
        constant_engine([5.0, 9.0, 0.0, -1.0], [5.0, 1.0, 0.0, -1.0]),
        params,
        (1, 2),
        constraint=Never(3, 4),
    )
    assert {one.rejection.cause for one in rounds if one.rejection is not None} == {"drafter_wrong"}


def test_the_evidence_is_what_the_tables_say():
    rejection = first_rejection(
        constant_engine([0.0, 3.0, 1.0, 0.0], [3.0, 1.0, 2.0, -torch.inf]), GREEDY
    )
    target = torch.tensor([0.0, 3.0, 1.0, 0.0]).double().softmax(0)
    drafter = torch.tensor([3.0, 1.0, 2.0]).double().softmax(0)
    evidence = rejection.evidence
    assert evidence.wanted_id == 1
    assert evidence.target_probability == pytest.approx(float(target[1]))
    assert evidence.drafter_probability == pytest.approx(float(drafter[1]))
    assert evidence.drafter_rank == 3
    assert evidence.target_entropy == pytest.approx(float(-(target * target.log2()).sum()))
    assert evidence.drafter_entropy == pytest.approx(float(-(drafter * drafter.log2()).sum()))
    assert [token_id for token_id, _ in evidence.target_top] == [1, 2, 0, 3]
    assert [token_id for token_id, _ in evidence.drafter_top] == [0, 2, 1, 3]


def test_equally_likely_tokens_rank_by_their_ids():
    rejection = first_rejection(constant_engine([0.0, 0.0, 3.0], [1.0, 3.0, 3.0]), GREEDY)
    assert rejection.drafted_id == 1
    assert rejection.evidence.drafter_rank == 2
    assert [token_id for token_id, _ in rejection.evidence.drafter_top][:2] == [1, 2]


def test_a_token_that_the_drafter_cannot_say_has_no_rank():
    rejection = first_rejection(
        constant_engine([0.0, 3.0, 1.0], [3.0, -torch.inf, 2.0]), SamplingParams(max_tokens=4)
    )
    assert rejection.cause == "vocabulary"
    assert (rejection.evidence.drafter_rank, rejection.evidence.drafter_probability) == (None, 0.0)


def ending_among_drafts():
    """Both models say 3, which is to end the answer."""
    engine = constant_engine([0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 5.0], num_slots=4)
    engine.target.table[2, 3] = torch.tensor([5.0, 0.0, 0.0, 0.0])
    engine.target.table[1, 2] = torch.tensor([5.0, 0.0, 0.0, 0.0])
    return engine


def test_an_end_among_the_drafts_is_a_stop():
    # A stop string is known only once it is written: the drafts behind it were for nothing.
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    rounds, outputs = record(
        ending_among_drafts(), params, (1, 2), scan_stop=lambda token_id: token_id == 3
    )
    last = rounds[-1]
    assert (last.token_ids, last.num_kept) == ((3,), 1)
    assert (last.rejection.slot, last.rejection.cause, last.rejection.evidence) == (1, "stop", None)
    assert num_rejections(outputs) == 1


def test_nothing_is_drafted_behind_a_token_that_ends_the_answer():
    params = SamplingParams(max_tokens=9, min_tokens=1, ignore_eos=True, stop_token_ids=(3,))
    rounds, outputs = record(ending_among_drafts(), params, (1, 2))
    last = rounds[-1]
    assert (last.token_ids, last.drafted_ids, last.rejection) == ((3,), (3,), None)
    assert num_rejections(outputs) == 0


def test_an_end_in_place_of_a_draft_is_a_stop():
    engine = constant_engine([5.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0])
    engine.target.table[2, 0] = torch.tensor([0.0, 0.0, 0.0, 5.0])
    ending = first_rejection(engine, SamplingParams(max_tokens=9), eos_ids=frozenset({3}))
    assert (ending.cause, ending.drafted_id, ending.evidence.wanted_id) == ("stop", 0, 3)


class NotItself(TellingDrafter):
    """Drafts something else than its logits say."""

    def _guesses(self, row):
        return [(token_id + 1) % 4 for token_id in super()._guesses(row)]


def test_a_draft_that_its_logits_do_not_explain_is_other():
    engine = constant_engine([5.0, 1.0, 0.0, 0.0], [5.0, 1.0, 0.0, 0.0])
    engine.proposer.drafter = NotItself(engine.drafter.table)
    assert first_rejection(engine, GREEDY).cause == "other"


def test_logits_that_are_no_numbers_are_other_and_leave_plain_values():
    engine = constant_engine([0.0, 5.0, 0.0], [0.0, torch.nan, 0.0])
    engine.drafter._guesses = lambda row: [0]  # what DFlash drafts there
    rejection = first_rejection(engine, GREEDY)
    assert rejection.cause == "other"
    assert rejection.evidence.drafter_entropy is None
    engine = constant_engine([5.0, 0.0], [5.0, 0.0])
    engine.target.table[0, 0] = torch.nan
    rounds, outputs = record(engine, GREEDY, (1, 1))
    assert outputs[-1].finish_reason == "error"
    assert all(one.rejection is None or one.rejection.cause == "other" for one in rounds)
    engine = constant_engine([0.0, torch.inf, 1.0], [5.0, 0.0, 0.0])
    assert first_rejection(engine, GREEDY).evidence.target_probability == 1.0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_a_drafter_that_shows_nothing_is_explained_by_its_drafts(params):
    for drafter in (RandomDrafter(3, VOCAB_SIZE), AlwaysWrongDrafter(3, VOCAB_SIZE)):
        rounds, outputs = record(Engine(TableTarget.random(VOCAB_SIZE), drafter), params)
        rejections = [one.rejection for one in rounds if one.rejection is not None]
        assert len(rejections) == num_rejections(outputs) > 0
        assert {rejection.cause for rejection in rejections} <= set(CAUSES) - {"other"}
        assert all(rejection.evidence.drafter_rank is None for rejection in rejections)
