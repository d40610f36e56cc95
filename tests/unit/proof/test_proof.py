"""`blockdraft prove` on a tiny pair: nothing differs, and every planted fault is found."""

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from blockdraft import LLM, ConfigError, Grammar, RequestError
from blockdraft.core.plan import NOTHING, ForwardPlan, PlannedRow, Proposal
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target.interface import TargetOutput
from blockdraft.proof import context, faults
from blockdraft.proof.cases import SETTINGS, plan_cases
from blockdraft.proof.config import ProofConfig
from blockdraft.proof.context import check_context
from blockdraft.proof.controls import CONTROLS, run_control, suitable_cases
from blockdraft.proof.corpus import ProofPrompt
from blockdraft.proof.differences import first_differences
from blockdraft.proof.findings import Findings
from blockdraft.proof.prove import Proof
from blockdraft.proof.ways import (
    AS_SERVED,
    BATCHED,
    CHUNKS,
    DRAFTED,
    FROM_MEMORY,
    LOOKUP,
    PLAIN,
    TREES,
    Way,
    run,
    ways_of,
)
from blockdraft.speculate import verify as verify_module
from blockdraft.speculate.sampler import logits as logits_module
from blockdraft.speculate.sampler import reference
from blockdraft.speculate.sampler.logits import Place, Scores
from blockdraft.speculate.sampler.philox import Stream
from blockdraft.speculate.verify import TokenLogprobs, Verdict
from tests.parity.faults import digest_without_parent
from tests.small_llm import assert_nothing_left, load_llm

CONFIG = ProofConfig(
    max_tokens=12, num_settings=2, num_context_cases=2, num_stock_prompts=2, num_draws=1000
)
CORPUS = [
    ProofPrompt("a", "short", "the abc"),
    ProofPrompt("b", "raw", "!!\tthe   \n" * 9, raw=True),
    ProofPrompt("c", "cut", "ab 🦊", raw=True, take=-1),
    ProofPrompt("d", "one", "a", raw=True, take=1),
    ProofPrompt("e", "long", "the quick " * 20),
    ProofPrompt("f", "too long", "x" * 600),
]


def prove(llm: LLM, **changes: Any) -> Findings:
    return Proof(llm, replace(CONFIG, **changes), CORPUS).run()


@pytest.fixture(scope="module")
def findings(llm: LLM) -> Findings:
    """One whole proof, on either kind of target."""
    return prove(llm)


def test_a_sound_pair_is_proven(findings: Findings, llm: LLM) -> None:
    assert findings.failures == []
    assert findings.verdict == "proven"
    names = [check.way.name for check in findings.ways]
    assert names[:3] == ["drafted", "in a batch", "in five chunks"]
    assert names[-2:] == ["adaptive", "as served"]
    for check in findings.ways:
        assert check.num_cases
        assert check.num_tokens > check.num_cases
        assert not check.differences
    assert findings.ways[0].acceptance.drafted
    assert_nothing_left(llm)


def test_the_plan_takes_all_settings_in_turn(llm: LLM) -> None:
    many = [ProofPrompt(str(index), "k", "the abc") for index in range(len(SETTINGS))]
    plan = plan_cases(llm, many, [], CONFIG)
    assert {case.setting for case in plan.cases} == set(SETTINGS)
    assert len({case.id for case in plan.cases}) == 2 * len(many)


def test_faults_may_be_planted_in_cases_of_all_settings(llm: LLM) -> None:
    many = [ProofPrompt(str(index), "k", "the abc") for index in range(len(SETTINGS))]
    cases = plan_cases(llm, many, [], replace(CONFIG, num_settings=1)).cases
    for control in CONTROLS:
        found = suitable_cases(llm, control, cases, len(SETTINGS))
        assert found
        if control.in_grammar:
            assert {case.setting for case in found} == set(SETTINGS)
            assert all(case.stop_ids >= llm.tokenizer.eos_ids for case in found)


def test_what_the_target_cannot_take_is_left_out_of_the_corpus_only(llm: LLM) -> None:
    plan = plan_cases(llm, CORPUS, [], CONFIG)
    assert list(plan.left_out) == ["f"]
    assert "512" in plan.left_out["f"]
    with pytest.raises(RequestError, match="prompt f: "):
        plan_cases(llm, [], CORPUS, CONFIG)
    with pytest.raises(RequestError, match="two prompts have the id 'a'"):
        plan_cases(llm, CORPUS, CORPUS[:1], CONFIG)
    with pytest.raises(RequestError, match="can take no prompt"):
        plan_cases(llm, CORPUS[-1:], [], CONFIG)


def test_prompts_are_cut_where_they_ask_for_it(llm: LLM) -> None:
    plan = plan_cases(llm, CORPUS, [], CONFIG)
    ids = {case.prompt.id: case.prompt_ids for case in plan.cases}
    assert len(ids["d"]) == 1
    assert llm.tokenizer.decode(ids["c"]).endswith("\ufffd")


def test_every_control_is_caught(findings: Findings) -> None:
    assert [control.name for control in findings.controls] == [c.name for c in CONTROLS]
    for control in findings.controls:
        assert control.caught, control
        assert control.evidence


@pytest.mark.one_in(2)
def test_the_context_and_the_distributions_are_right(findings: Findings) -> None:
    assert len({context.case_id for context in findings.contexts}) == 2
    assert all(context.case_id.endswith("/greedy") for context in findings.contexts)
    assert all(context.is_right for context in findings.contexts)
    assert [check.planted for check in findings.distributions].count(True) == 1
    assert len(findings.agreements) == 2


@pytest.mark.one_in(2)
def test_an_uncaught_control_makes_a_proof_fail(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fault(engine: object) -> Any:
        return faults.verifying_by(faults.verify)

    harmless = replace(CONTROLS[0], plant=no_fault)
    monkeypatch.setattr("blockdraft.proof.prove.CONTROLS", (harmless,))
    found = prove(llm, num_control_cases=2)
    assert found.failures == [f"fault not caught: {harmless.name}"]


def test_faults_are_taken_out_again(llm: LLM) -> None:
    engine = llm.engine
    before = vars(engine.target).copy(), vars(engine.drafter).copy()
    for control in CONTROLS:
        with control.plant(engine):
            pass
    assert "forward" not in vars(engine.target)
    assert (vars(engine.target), vars(engine.drafter)) == before
    assert faults.engine_module.verify is faults.verify
    assert faults.exact.backend_for is faults.backend_for
    assert faults.AttentionPlan.attend.__name__ == "attend"
    assert faults.AttentionPlan.run_layer.__name__ == "run_layer"


def watch_batches(llm: LLM) -> AbstractContextManager[None]:
    """Note in `llm.batches` how many rows, and how many of prompts, each forward has."""
    forward, batches = llm.engine.target.forward, []

    def watched(plan: ForwardPlan) -> TargetOutput:
        batches.append((len(plan), sum(planned.row.is_prompt for planned in plan)))
        return forward(plan)

    llm.batches = batches
    return faults.replaced(llm.engine.target, "forward", watched)


def test_chunks_and_batches_are_what_they_say(llm: LLM) -> None:
    cases = plan_cases(llm, CORPUS, [], replace(CONFIG, num_settings=1)).cases
    (alone,) = [case for case in cases if case.prompt.id == "b"]
    for way, num_prompt_rows in ((PLAIN, 1), (DRAFTED, 1), (CHUNKS, 5)):
        with watch_batches(llm):
            run(llm, [alone], way)
        assert sum(prompts for _, prompts in llm.batches) == num_prompt_rows
        assert max(rows for rows, _ in llm.batches) == 1
    with watch_batches(llm):
        outputs = run(llm, cases, BATCHED)
    assert len(outputs) == len(cases)
    assert max(rows for rows, _ in llm.batches) >= len(cases)


def test_memory_is_really_reused(folders: tuple[Path, Path]) -> None:
    llm = load_llm(folders)
    plan = plan_cases(llm, CORPUS, [], replace(CONFIG, num_settings=1))
    outputs = run(llm, plan.cases, FROM_MEMORY)
    assert {len(case.prompt_ids) > 64 for case in outputs} == {True}
    assert llm.engine.target.memory.num_reused_tokens >= 64 * len(outputs)
    assert not llm.engine.target.memory.reuse


def test_a_way_that_fails_leaves_no_mark(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    free, memory = llm.engine.proposer.free, llm.engine.target.memory
    cases = plan_cases(llm, CORPUS[4:5], [], CONFIG).cases
    monkeypatch.setattr(llm, "generate", Mock(side_effect=RuntimeError("broken")))
    for way in (FROM_MEMORY, LOOKUP):
        with pytest.raises(RuntimeError, match="broken"):
            run(llm, cases, way)
        assert llm.engine.proposer.free == free
        assert not getattr(memory, "reuse", False)


def test_a_difference_names_its_place(llm: LLM) -> None:
    case = plan_cases(llm, CORPUS, [], CONFIG).cases[0]
    output = run(llm, [case], PLAIN)[case]
    (sample,) = output
    assert first_differences(case, output, output, bits=True) == []
    ids = (*sample.token_ids[:4], sample.token_ids[4] + 1, *sample.token_ids[5:])
    (found,) = first_differences(case, (replace(sample, token_ids=ids),), output, bits=True)
    assert (found.what, found.index, found.found) == ("token_ids", 4, ids[4])
    shorter = replace(sample, token_ids=sample.token_ids[:-1])
    (found,) = first_differences(case, (shorter,), output, bits=True)
    assert (found.index, found.found) == (len(ids) - 1, None)
    moved = replace(sample.logprobs[2], logprob=sample.logprobs[2].logprob + 1e-7)
    bits = replace(sample, logprobs=(*sample.logprobs[:2], moved, *sample.logprobs[3:]))
    (found,) = first_differences(case, (bits,), output, bits=True)
    assert (found.what, found.index) == ("logprobs", 2)
    assert first_differences(case, (bits,), output, bits=False) == []
    broken = replace(sample, error="no memory")
    (found,) = first_differences(case, (broken,), (broken,), bits=False)
    assert (found.verdict, found.found) == ("error", "no memory")


def test_each_sample_has_a_difference_of_its_own(llm: LLM) -> None:
    case = plan_cases(llm, CORPUS, [], CONFIG).cases[0]
    (sample,) = run(llm, [case], PLAIN)[case]
    changed = replace(sample, text=sample.text + "!")
    found = first_differences(case, (sample, changed, changed), (sample, sample, sample), bits=True)
    assert [(one.sample, one.what) for one in found] == [(1, "text"), (2, "text")]


def test_the_context_check_needs_drafts(llm: LLM) -> None:
    case = plan_cases(llm, CORPUS, [], CONFIG).cases[0]
    run(llm, [case], PLAIN)  # as in a proof, which leaves no prompt reused
    assert check_context(llm.engine, case).is_right
    with faults.shifted_features(llm.engine):
        assert not check_context(llm.engine, case).is_right
    llm.use_fixed_drafting(0)  # as adaptive drafting may, with a drafter as bad as ours
    assert check_context(llm.engine, case).is_right
    undrafted = replace(case, params=replace(case.params, max_tokens=1))
    looked = check_context(llm.engine, undrafted)
    assert looked.num_tokens == 0
    assert not looked.is_right


def test_the_context_check_looks_at_trees(llm: LLM) -> None:
    """Features of the first positions of a row are right for a chain, and wrong for a branch."""

    def first_positions(planned: PlannedRow, nodes: list[int]) -> list[int]:
        return list(range(len(planned.row.new_ids) + len(nodes)))

    case = plan_cases(llm, CORPUS, [], replace(CONFIG, max_tokens=64)).cases[0]
    run(llm, [case], PLAIN)
    assert check_context(llm.engine, case).is_right
    with patch.object(PlannedRow, "kept_positions", first_positions):
        assert not check_context(llm.engine, case).is_right


def fail_in_trees(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> str:
    propose = llm.engine.drafter.propose

    def broken(rows: list[Row]) -> list[Proposal]:
        if any(row.num_model_tokens > row.max_model_depth for row in rows):
            raise RuntimeError("no trees")
        return propose(rows)

    monkeypatch.setattr(llm.engine.drafter, "propose", broken)
    return r"trees: the drafter failed \d+ times"


def draft_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> str:
    propose = llm.engine.drafter.propose
    monkeypatch.setattr(
        llm.engine.drafter, "propose", lambda rows: [NOTHING for _ in propose(rows)]
    )
    return "drafted: nothing was drafted"


def take_nothing_over(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> str:
    memory = llm.engine.target.memory
    start = memory.open
    monkeypatch.setattr(memory, "open", lambda key, ids, **how: start(key, ids[:1], **how))
    return "prompt from the cache: no prompt was reused"


@pytest.mark.parametrize("empty", [fail_in_trees, draft_nothing, take_nothing_over])
def test_a_way_that_tests_nothing_makes_a_proof_fail(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, empty: Any
) -> None:
    llm = load_llm(folders)
    reason = empty(llm, monkeypatch)
    found = prove(llm, num_context_cases=0, num_stock_prompts=0)
    assert any(re.fullmatch(reason, failure) for failure in found.failures), found.failures
    assert not any(check.differences for check in found.ways)


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_greedy_and_sampled_requests_must_each_be_drafted(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    llm = load_llm(folders)
    propose = llm.engine.drafter.propose

    def draft_the_others(rows: list[Row]) -> list[Proposal]:
        return [
            NOTHING if row.sequence.params.is_sampled == (kind == "sampled") else proposal
            for row, proposal in zip(rows, propose(rows), strict=True)
        ]

    proof = Proof(llm, CONFIG, CORPUS[:2])
    assert {case.params.is_sampled for case in proof._cases} == {False, True}
    proof._decode_plainly()
    proof._check_way(TREES)
    assert proof.findings.failures == []
    monkeypatch.setattr(llm.engine.drafter, "propose", draft_the_others)
    proof._check_way(TREES)
    assert proof.findings.failures == [f"trees: nothing was drafted in {kind} requests"]


def test_others_must_not_draft_instead_of_the_drafter(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_llm(folders, lookup=True)
    draft_nothing(llm, monkeypatch)
    proof = Proof(llm, CONFIG, [ProofPrompt("r", "k", "abcabc" * 30, raw=True)])
    proof._decode_plainly()
    proof._check_way(LOOKUP)
    (check,) = proof.findings.ways
    assert check.acceptance.drafted_by["lookup"]
    assert "lookup: nothing was drafted by dflash" in proof.findings.failures


def test_a_batch_in_which_nobody_was_preempted_has_tested_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof = Proof(llm, CONFIG, CORPUS[:2])
    proof._decode_plainly()
    proof._check_way(BATCHED)
    assert proof.findings.failures == []
    monkeypatch.setattr(llm.engine.scheduler, "preempt", lambda sequence: None)
    proof._check_way(BATCHED)
    assert proof.findings.failures == ["in a batch: nothing was preempted"]


def test_a_target_that_follows_no_grammar_is_proven_without(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(grammar: Grammar) -> None:
        raise RequestError("no grammar here")

    monkeypatch.setattr(llm.samples.grammars, "compile", refuse)
    many = [ProofPrompt(str(index), "k", "the abc") for index in range(len(SETTINGS))]
    cases = plan_cases(llm, many, [], CONFIG).cases
    assert {case.setting for case in cases} == {*SETTINGS} - {"grammar"}
    (control,) = (one for one in CONTROLS if one.in_grammar)
    assert run_control(llm, control, cases, None).skipped == "no grammar here"


def test_a_fault_that_ends_requests_is_not_caught(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(engine: object) -> Any:
        def failing(plan: ForwardPlan, logits: object) -> list[Verdict]:
            return [Verdict([], [], error="broken") for _ in plan]

        return faults.verifying_by(failing)

    crude = replace(CONTROLS[0], plant=end)
    cases = plan_cases(llm, CORPUS[:1], [], CONFIG).cases
    assert not run_control(llm, crude, cases, None).caught


@pytest.mark.parametrize("place", [0, 1])
def test_a_context_of_no_numbers_is_wrong(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    held = context._held

    def without_numbers(*where: Any) -> list[tuple[Any, ...]]:
        found = [list(pair) for pair in held(*where)]
        found[-1][place] = found[-1][place] * float("nan")
        return [tuple(pair) for pair in found]

    monkeypatch.setattr(context, "_held", without_numbers)
    case = plan_cases(llm, CORPUS, [], CONFIG).cases[0]
    run(llm, [case], PLAIN)
    assert not check_context(llm.engine, case).is_right


def test_a_target_that_takes_no_trees_is_not_proven_with_trees(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (TREES in ways_of(llm)) == llm.engine.target.takes_trees
    monkeypatch.setattr(llm.engine.target, "takes_trees", False)
    assert TREES not in ways_of(llm)


def test_a_proof_needs_a_batch(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="max_concurrency is 1"):
        Proof(load_llm(folders, max_concurrency=1), CONFIG, CORPUS)


def test_a_proof_needs_a_drafter(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match="without a drafter"):
        Proof(LLM(str(folders[0]), None, dtype="float32"), CONFIG, CORPUS)


@contextmanager
def other_noise(llm: LLM, has_other: Any) -> Iterator[None]:
    """Some sequences are not chosen with the noise of their seed."""

    def stream(place: Place) -> Stream:
        own = place.sequence
        seed = own.seed + bool(has_other(own))
        return Stream(seed, own.sample_index, len(own.token_ids) + place.num_ahead)

    with patch.object(Place, "stream", property(stream)):
        yield


def reuse_with_samples(llm: LLM) -> AbstractContextManager[None]:
    """All samples but the first are damaged where the prompt is reused."""
    return other_noise(llm, lambda own: own.num_reused and own.sample_index)


@contextmanager
def reuse_of_own_output(llm: LLM) -> Iterator[None]:
    """What a preempted request reuses of its own output is not what it was."""
    memory, damaged = llm.engine.target.memory, set[int]()
    reuse = memory.open

    def faulty(key: int, token_ids: list[int], **options: Any) -> int:
        num_reused = reuse(key, token_ids, **options)
        if key in llm.engine.progress:
            sequence: Sequence = llm.engine.progress[key].sequence
            damaged.update([key] if num_reused > sequence.num_prompt else [])
        return num_reused

    with (
        faults.replaced(memory, "open", faulty),
        other_noise(llm, lambda own: own.key in damaged),
    ):
        yield


def drafted_prompt_scores(llm: LLM) -> AbstractContextManager[object]:
    """The prompt of a request that drafts is scored in the wrong order."""
    score = verify_module._score

    def faulty(planned: Any, logits: Any) -> list[TokenLogprobs]:
        drafts = planned.row.sequence.params.num_draft_tokens != 0
        return score(planned, logits)[:: -1 if drafts else 1]

    return patch.object(verify_module, "_score", faulty)


def no_bias_behind_drafts(llm: LLM) -> AbstractContextManager[object]:
    """Biases count for the anchor's choice alone."""
    processed = reference.processed

    def faulty(scores: Scores, place: Place) -> Scores:
        if place.num_ahead:
            bare = copy.copy(place.sequence)
            bare.params = replace(bare.params, logit_bias={})
            place = replace(place, sequence=bare)
        return processed(scores, place)

    return patch.object(reference, "processed", faulty)


def may_stop_behind_drafts(llm: LLM) -> AbstractContextManager[object]:
    """`min_tokens` counts for the anchor's choice alone."""
    processed = reference.processed

    def faulty(scores: Scores, place: Place) -> Scores:
        if place.num_ahead:
            free = copy.copy(place.sequence)
            free.params = replace(free.params, min_tokens=0)
            place = replace(place, sequence=free)
        return processed(scores, place)

    return patch.object(reference, "processed", faulty)


def no_penalty_for_drafts(llm: LLM) -> AbstractContextManager[object]:
    """Penalties count what is committed, and not the draft tokens between that and a choice."""
    penalize = logits_module.penalize

    def faulty(scores: Scores, sequence: Sequence, path: list[int]) -> None:
        penalize(scores, sequence, [])

    return patch.object(logits_module, "penalize", faulty)


def one_seed_a_step(llm: LLM) -> AbstractContextManager[None]:
    """All rows of a step are chosen with the seed of the first."""

    def faulty(plan: ForwardPlan, logits: Any) -> list[Verdict]:
        sequences = [planned.row.sequence for planned in plan]
        seeds = [sequence.seed for sequence in sequences]
        for sequence in sequences:
            sequence.seed = seeds[0]
        verdicts = faults.verify(plan, logits)
        for sequence, seed in zip(sequences, seeds, strict=True):
            sequence.seed = seed
        return verdicts

    return faults.verifying_by(faulty)


@pytest.mark.parametrize(
    ("plant", "setting", "way"),
    [
        (one_seed_a_step, "temperature", BATCHED),
        (may_stop_behind_drafts, "all filters", TREES),
        (no_penalty_for_drafts, "logprobs", LOOKUP),
        (reuse_with_samples, "samples", FROM_MEMORY),
        (reuse_of_own_output, "temperature", AS_SERVED),
        (drafted_prompt_scores, "logprobs", DRAFTED),
        (no_bias_behind_drafts, "logprobs", LOOKUP),
        (lambda llm: digest_without_parent(), "greedy", FROM_MEMORY),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", value)),
)
def test_faults_that_are_not_planted_in_a_proof_are_found(
    folders: tuple[Path, Path], plant: Any, setting: str, way: Way
) -> None:
    llm = load_llm(folders)
    texts = ["a" * 200, "the quick " * 12, "fox " * 9, "b!! " * 20, "the abc", "x y z"]
    prompts = [ProofPrompt(str(i), "k", text, raw=True) for i, text in enumerate(texts)]
    config = replace(CONFIG, max_tokens=64, num_settings=len(SETTINGS))
    every = plan_cases(llm, prompts, [], config).cases
    cases = [case for case in every if case.setting == setting]
    assert len(cases) == len(prompts)
    plain = run(llm, cases, PLAIN)

    def is_found() -> bool:
        outputs = run(llm, cases, way)
        return any(first_differences(c, outputs[c], plain[c], bits=True) for c in outputs)

    assert not is_found()
    with plant(llm):
        assert is_found()
