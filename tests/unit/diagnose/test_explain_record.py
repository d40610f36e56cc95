"""Recording changes nothing, misses nothing, and is not there when it is off."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from blockdraft.core.plan import ROOT, Proposal, Tree
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.diagnose.explain.record import recording
from blockdraft.diagnose.explain.run import explain
from blockdraft.diagnose.explain.sums import sum_all, sum_rounds
from blockdraft.diagnose.explain.terminal import summary_line
from blockdraft.engine.engine import Engine
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.speculate.commit import commit
from blockdraft.speculate.drafters.slots import Guessable
from tests.explain_fakes import VOCAB_SIZE, TellingDrafter, like_target, record
from tests.fakes import TableTarget
from tests.small_llm import assert_nothing_left, params

GREEDY = params(max_tokens=60)
SAMPLED = params(max_tokens=60, temperature=1.0, seed=7, top_p=0.9)
PENALIZED = params(max_tokens=60, temperature=0.8, seed=7, repetition_penalty=1.3)


def total_kept(stats: AcceptanceStats) -> int:
    return stats.accepted.total()


@pytest.mark.parametrize("asked", [GREEDY, SAMPLED, PENALIZED])
def test_the_rounds_of_real_models_add_up(llm, asked):
    prompt_ids = llm.tokenizer.encode("the abc of the abc")
    plain = llm.generate(prompt_ids, asked).completions[0]
    (explanation,) = explain(llm, prompt_ids, asked, prompt="the abc")
    completion, sums = explanation.completion, explanation.sums
    assert completion.token_ids == plain.token_ids
    committed = [token_id for one in explanation.rounds for token_id in one.token_ids]
    assert committed == list(completion.token_ids)
    assert [one.is_prompt for one in explanation.rounds].count(True) == 1
    stats = completion.acceptance
    assert sums.num_rounds == stats.num_passes
    assert sums.num_tokens == stats.num_tokens
    assert sums.num_drafted == stats.drafted.total()
    assert sums.total.num_kept == total_kept(stats)
    # Each pass whose drafts were not all kept is a rejection.
    num_whole = sum(
        one.num_kept == len(one.drafted_ids) for one in explanation.rounds if not one.is_prompt
    )
    assert sums.total.num_rejected == sums.num_rounds - num_whole > 0
    assert sums.total.causes["other"] == 0
    for parts in (sums.by_kind.values(), sums.by_slot):
        assert sum(tally.num_kept for tally in parts) == sums.total.num_kept
        assert sum(tally.num_rejected for tally in parts) == sums.total.num_rejected
    assert_nothing_left(llm)


class SiblingDrafter(TellingDrafter):
    """Two tokens for the next place, and one behind the first of them."""

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        tree = Tree((1, 2, 3), (ROOT, ROOT, 0))
        return [Proposal(tree, (0.5, 0.5, 0.5), (self.kind,) * 3) for _ in rows]


def test_candidates_beside_the_path_are_counted():
    target = TableTarget.random(VOCAB_SIZE, 0)
    engine = Engine(target, SiblingDrafter(target.table.mean(dim=0)[None].repeat(3, 1, 1)))
    rounds, outputs = record(engine, params(max_tokens=20))
    drafted = [one for one in rounds if one.drafted_ids]
    assert drafted
    assert all(len(one.drafted_ids) + one.num_beside == 3 for one in drafted)
    sums = sum_rounds(rounds, ["prose"] * 20)
    assert sums.num_drafted + sums.num_beside == sum(one.num_drafted for one in outputs)
    assert f"{sums.num_drafted} drafted and {sums.num_beside} beside them" in summary_line(sums)
    assert (
        sum_all([sums, sums]).num_beside == 2 * sums.num_beside == sums.to_dict()["num_beside"] * 2
    )


def test_samples_keep_their_own_rounds(llm):
    prompt_ids = llm.tokenizer.encode("the abc")
    asked = params(n=3, temperature=1.0, seed=3)
    explanations = explain(llm, prompt_ids, asked, prompt="")
    assert len({one.completion.token_ids for one in explanations}) > 1
    for one in explanations:
        assert [i for r in one.rounds for i in r.token_ids] == list(one.completion.token_ids)
        assert "".join(one.pieces).startswith(one.completion.text)


def test_plain_values_hold_everything(llm):
    (explanation,) = explain(llm, llm.tokenizer.encode("the abc"), GREEDY, prompt="the abc")
    described = explanation.to_dict()
    named = {i for one in described["rounds"] for i in (*one["drafted_ids"], *one["token_ids"])}
    assert {str(i) for i in named} <= described["labels"].keys()
    assert described["sums"]["num_rejected"] == sum(described["sums"]["causes"].values())


def fail_while_recording(engine: Engine) -> None:
    with recording(engine):
        assert engine.drafter.watch is not None
        raise RuntimeError


def test_recording_ends_with_its_scope(llm):
    with pytest.raises(RuntimeError):
        fail_while_recording(llm.engine)
    assert llm.engine.observer is None
    assert llm.engine.drafter.watch is None


def test_nothing_is_computed_for_nobody(llm, monkeypatch):
    calls = []
    whole = Guessable.over_whole_vocabulary
    monkeypatch.setattr(
        Guessable, "over_whole_vocabulary", lambda own, x: calls.append(1) or whole(own, x)
    )
    llm.generate(llm.tokenizer.encode("the abc"), GREEDY)
    assert not calls


def test_a_step_that_is_made_again_counts_once(monkeypatch):
    target = TableTarget.random(VOCAB_SIZE)
    engine = Engine(target, like_target(target, num_slots=3, wrong=1.0, seed=1))
    expected, _ = record(engine, SamplingParams(max_tokens=20))
    turns = itertools.cycle([True, False])

    def commit_every_other_time(*args: Any) -> Any:
        if next(turns):
            raise KeyboardInterrupt
        return commit(*args)

    monkeypatch.setattr("blockdraft.engine.engine.commit", commit_every_other_time)
    num_failed = 0
    with recording(engine) as recorder:
        engine.add([1, 2, 3], SamplingParams(max_tokens=20))
        while engine.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                num_failed += 1
    assert recorder.take() == [expected]
    assert num_failed == len(expected)


def test_sums_of_parts_are_sums_of_all():
    target = TableTarget.random(VOCAB_SIZE)
    engine = Engine(target, like_target(target, num_slots=3, wrong=1.0, seed=1))
    rounds, _ = record(engine, SamplingParams(max_tokens=80))
    kinds = (["prose", "code", "digits"] * 40)[:80]
    whole = sum_rounds(rounds, kinds)
    parts = sum_all([sum_rounds(rounds[:9], kinds), sum_rounds(rounds[9:], kinds)])
    assert parts == whole
    assert set(whole.by_kind) == {"prose", "code", "digits"}
    assert whole.acceptance_length == whole.num_tokens / whole.num_rounds
