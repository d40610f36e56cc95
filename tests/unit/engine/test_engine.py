"""The engine when something is in the way: too little memory, failures, interruptions.

Whatever happens to one sequence, all others have the tokens that they have alone.
"""

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from blockdraft.allocation.policy import VerifyAll
from blockdraft.cache.kv import KVLayer
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.errors import ContextTooLong, RequestError
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine import engine as engine_module
from blockdraft.engine.engine import Engine
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.target.interface import TargetOutput
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.none import NoDrafter
from tests.fakes import (
    ConstantDrafter,
    NoisyOracleDrafter,
    PagedTableTarget,
    RandomDrafter,
    TableTarget,
)
from tests.parity.checks import (
    check_draft_context,
    check_together_equals_alone,
    generate_plain,
    joined,
    run,
)
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

TABLE = TableTarget.random(VOCAB_SIZE).table
SAMPLED = {"temperature": 1.0, "seed": 3, "repetition_penalty": 1.1}
GREEDY = SamplingParams(max_tokens=24)


def random_prompts(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, longest))] for _ in range(num)
    ]


# Too little memory for K/V.


@pytest.mark.one_in(4)
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(4))
def test_a_preempted_sequence_continues_exactly(
    options: dict[str, Any], drafts: bool, seed: int
) -> None:
    params = SamplingParams(max_tokens=100, logprobs=1, **options)
    prompts = random_prompts(8, 2 * PAGE_SIZE, seed)
    prompts[5] = list(prompts[2])
    target = PagedTableTarget(TABLE, Pages(6))
    drafter = NoisyOracleDrafter(6, VOCAB_SIZE, seed=seed) if drafts else NoDrafter()
    engine = Engine(target, drafter, prefill_chunk=48)
    heard: dict[int, list[int]] = {}
    expected, keys = [], []
    for prompt in prompts:
        plain = generate_plain(TableTarget(TABLE), prompt, params)
        own: list[int] = []
        key = engine.add(prompt, params, scan_stop=lambda i, own=own: own.append(i) or False)
        heard[key] = own
        if isinstance(drafter, NoisyOracleDrafter):
            drafter.known[key] = plain.token_ids
        expected.append(plain)
        keys.append(key)
    outputs = run(engine)
    assert engine.scheduler.num_preempted >= 2
    for key, plain in zip(keys, expected, strict=True):
        assert joined(outputs[key]) == heard[key] == plain.token_ids
        assert [entry for o in outputs[key] for entry in o.logprobs] == plain.logprobs
        assert engine.take(key).sequence.finish_reason == "length"
    target.memory.check_integrity()
    assert target.memory.num_available == target.memory.num_pages - 1


@pytest.mark.one_in(9)
@pytest.mark.parametrize("num_prompt", range(PAGE_SIZE - 12, PAGE_SIZE + 1))
def test_a_preempted_sequence_may_come_back_right_behind_a_full_page(num_prompt: int) -> None:
    """Its twin, which is ahead, has published the page: only the anchor is left to compute."""
    target = make_target("paged", tiny_target(dtype=torch.float64), num_pages=4)
    oracle = make_target("sequential", tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    prompt = [5 * i % VOCAB_SIZE for i in range(num_prompt)]
    params = SamplingParams(max_tokens=40)
    engine = Engine(target, drafter)
    keys = [engine.add(prompt, params)]
    for _ in range(3):
        engine.step()
    keys.append(engine.add(prompt, params))
    expected = generate_plain(oracle, prompt, params).token_ids
    while engine.has_work:
        engine.step()
        for key in keys:
            check_draft_context(engine, key)
    assert engine.scheduler.num_preempted
    assert [engine.take(key).sequence.output_ids for key in keys] == [expected] * 2


def test_what_never_fits_the_memory_is_refused_with_both_numbers() -> None:
    target = PagedTableTarget(TABLE, Pages(3))
    engine = Engine(target, NoDrafter())
    params = SamplingParams(max_tokens=29)
    with pytest.raises(ContextTooLong, match=r"100 tokens .* 29 .*KV cache of 128 token"):
        engine.add([1] * 100, params)
    assert not engine.has_work
    # One less fits to the last slot, beside others too.
    prompts = [[1] * 99, [2] * 70, [1] * 99]
    check_together_equals_alone(
        target, ConstantDrafter(7, 3), TableTarget(TABLE), prompts, params, prefill_chunk=50
    )


def test_the_smaller_of_context_and_memory_is_named() -> None:
    target = PagedTableTarget(TABLE, Pages(3), max_context=100)
    with pytest.raises(ContextTooLong, match="context of 100 tokens"):
        Engine(target, NoDrafter()).add([1] * 90, SamplingParams(max_tokens=11))


# Too little memory for a forward.


class SmallTarget(TableTarget):
    """Runs out of memory in forwards of more than so many rows."""

    def __init__(self, error: BaseException, most: int) -> None:
        super().__init__(TABLE)
        self.error, self.most = error, most

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        output = super().forward(plan)
        if sum(len(planned.row.new_ids) for planned in plan) > self.most:
            raise self.error
        return output


SHORTAGES = (
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."),
)


@pytest.mark.parametrize("error", SHORTAGES, ids=lambda error: type(error).__name__)
def test_a_forward_without_memory_ends_the_largest_request_only(error: BaseException) -> None:
    target = SmallTarget(error, most=80)
    engine = Engine(target, ConstantDrafter(3, 7))
    prompts = [[1, 2, 3], [4] * 30, [5] * 90, [6] * 20]
    keys = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs = run(engine)
    assert not target.cached  # whoever takes an error away may do so much later
    for key, prompt in zip(keys, prompts, strict=True):
        sequence = engine.take(key).sequence
        if len(prompt) == 90:
            assert sequence.finish_reason == outputs[key][-1].finish_reason == "error"
            assert "forward pass of 90 tokens; lower max_concurrency (on the" in str(sequence.error)
            assert joined(outputs[key]) == []
        else:
            alone = generate_plain(TableTarget(TABLE), prompt, GREEDY)
            assert joined(outputs[key]) == alone.token_ids
            assert sequence.finish_reason == "length"


class NarrowTarget(TableTarget):
    """Runs out of memory in forwards of more than so many rows, candidates among them."""

    def __init__(self, most: int) -> None:
        super().__init__(TABLE)
        self.most, self.num_failed = most, 0

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        output = super().forward(plan)
        if sum(planned.num_positions for planned in plan) > self.most:
            self.num_failed += 1
            raise MemoryError
        return output


def test_a_forward_whose_candidates_do_not_fit_is_made_without_them() -> None:
    target = NarrowTarget(most=8)
    engine = Engine(target, ConstantDrafter(7, 3))
    prompts = [[1, 2, 3], [4, 5]]
    keys = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs = run(engine)
    assert target.num_failed
    for key, prompt in zip(keys, prompts, strict=True):
        assert joined(outputs[key]) == generate_plain(TableTarget(TABLE), prompt, GREEDY).token_ids
        assert engine.take(key).sequence.finish_reason == "length"
    assert not target.cached


def test_memory_that_ends_behind_the_commit_commits_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(TableTarget(TABLE), ConstantDrafter(7, 3))
    keys = [engine.add(prompt, GREEDY) for prompt in ([1, 2, 3], [4, 5])]
    real, calls = engine.allocator.record, itertools.count()

    def record(*args: Any) -> None:
        real(*args)
        if next(calls) % 3 == 1:
            raise MemoryError

    monkeypatch.setattr(engine.allocator, "record", record)
    outputs = run(engine)
    for key, prompt in zip(keys, ([1, 2, 3], [4, 5]), strict=True):
        plain = generate_plain(TableTarget(TABLE), prompt, GREEDY).token_ids
        assert joined(outputs[key]) == plain


def test_with_smaller_chunks_the_same_request_fits() -> None:
    target = SmallTarget(MemoryError(), most=80)
    result = generate_plain(target, [5] * 90, GREEDY, engine_options={"prefill_chunk": 64})
    assert result.finish_reason == "length"


def test_another_failure_of_the_forward_ends_nobody() -> None:
    target = SmallTarget(RuntimeError("boom"), most=80)
    engine = Engine(target, NoDrafter())
    key = engine.add([5] * 90, GREEDY)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    target.most = 100
    assert (
        joined(run(engine)[key]) == generate_plain(TableTarget(TABLE), [5] * 90, GREEDY).token_ids
    )


# Failures and interruptions.


class Failing:
    """Calls that raise by chance, before the real one runs or after it has."""

    def __init__(self, real: Callable[..., Any], draw: random.Random, error: BaseException) -> None:
        self.real, self.draw, self.error = real, draw, error
        self.num_failed = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        early, late = (self.draw.random() < 0.15 for _ in range(2))
        self.num_failed += early or late
        if early:
            raise self.error
        result = self.real(*args, **options)
        if late:
            raise self.error
        return result


PHASES = ("project", "write", "propose", "forward", "layer", "verify")


@pytest.mark.one_in(12)
@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_failed_is_made_again(
    way: Way, phase: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost and nothing comes twice, in tokens, caches and draft contexts."""
    target = make_target(way, tiny_target(dtype=torch.float64), num_pages=5)
    oracle = make_target("sequential", tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    holder, name = {
        "project": (drafter.model, "context_inputs"),
        "write": (drafter.contexts, "write" if way == "sequential" else "write_projected"),
        "propose": (drafter, "propose"),
        "forward": (target, "forward"),
        "layer": (target.layers[2], "forward"),
        "verify": (engine_module, "verify"),
    }[phase]
    draw = random.Random(1 + PHASES.index(phase))
    prompts = random_prompts(4, 90, seed=5)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1)
    expected = [generate_plain(oracle, prompt, params).token_ids for prompt in prompts]
    engine = Engine(target, drafter, prefill_chunk=50)
    keys = [engine.add(prompt, params) for prompt in prompts]
    failing = Failing(getattr(holder, name), draw, error)
    outputs: list[StepOutput] = []
    while engine.has_work:
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, failing)
            try:
                outputs += engine.step()
            except type(error):
                continue
        for key in keys:
            check_draft_context(engine, key)
    assert failing.num_failed >= 3
    for key, tokens in zip(keys, expected, strict=True):
        assert joined([o for o in outputs if o.key == key]) == tokens
        assert engine.take(key).sequence.output_ids == tokens
    if isinstance(target, PagedTarget):
        target.memory.check_integrity()


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_whose_opening_was_interrupted_is_drafted_for(
    way: Way, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(way, tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    expected = generate_plain(target, [1, 2, 3], GREEDY).token_ids
    engine = Engine(target, drafter)
    key = engine.add([1, 2, 3], GREEDY)
    real = drafter.open

    def interrupted(*args: Any) -> None:
        if late:
            real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(drafter, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_draft_context(engine, key)
    assert engine.proposer.failures.num_failures == 0
    assert outputs[1].num_drafted == drafter.max_nodes
    assert engine.take(key).sequence.output_ids == joined(outputs) == expected


@pytest.mark.parametrize("way", WAYS)
def test_a_sequence_that_cannot_be_opened_is_decoded_plainly(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(way, tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    engine = Engine(target, drafter)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    expected = [generate_plain(target, prompt, GREEDY).token_ids for prompt in prompts]
    keys = [engine.add(prompt, GREEDY) for prompt in prompts]
    real = drafter.open

    def fail(row: Row, num_reused: int) -> None:
        if row.sequence.key == keys[1]:
            raise RuntimeError("boom")
        real(row, num_reused)

    monkeypatch.setattr(drafter, "open", fail)
    outputs = run(engine)
    assert engine.proposer.failures.num_failures == 1
    for index, (key, tokens) in enumerate(zip(keys, expected, strict=True)):
        assert joined(outputs[key]) == engine.take(key).sequence.output_ids == tokens
        assert any(output.num_drafted for output in outputs[key]) == (index != 1)
    assert not drafter._known


def test_a_context_that_was_written_in_part_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second of two sequences runs out of memory while its context is appended."""
    target = make_target("sequential", tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    engine = Engine(target, drafter)
    keys = [engine.add([1, 2, 3], GREEDY), engine.add([4, 5, 6, 7], GREEDY)]
    calls, real = itertools.count(), drafter.contexts._new_context

    def new_context() -> Any:
        if next(calls) == 1:
            raise RuntimeError("boom")
        return real()

    monkeypatch.setattr(drafter.contexts, "_new_context", new_context)
    engine.step()
    outputs = {key: [output] for key, output in zip(keys, engine.step(), strict=True)}
    assert engine.proposer.failures.num_failures == 1
    # It was written again at once, row by row, and both are drafted for.
    assert [outputs[key][0].num_drafted for key in keys] == [drafter.max_nodes] * 2
    for key, rest in run(engine).items():
        outputs[key] += rest
    for key, prompt in zip(keys, ([1, 2, 3], [4, 5, 6, 7]), strict=True):
        expected = generate_plain(target, prompt, GREEDY).token_ids
        assert joined(outputs[key]) == expected[1:]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "^C"])
@pytest.mark.parametrize("failing", range(3))
@pytest.mark.parametrize("after", [0, 1, 9])
def test_a_stop_scanner_that_fails_ends_its_request_and_costs_the_others_nothing(
    after: int, failing: int, error: BaseException
) -> None:
    """Those before it in the step are committed already; what they got must not be lost."""
    target = PagedTableTarget(TABLE, Pages(9))
    drafter = NoisyOracleDrafter(5, VOCAB_SIZE)
    engine = Engine(target, drafter)
    params = SamplingParams(max_tokens=24, logprobs=0)
    prompts = [[1, 2], [3, 4, 5], [6, 7, 8]]
    plain = [generate_plain(TableTarget(TABLE), prompt, params) for prompt in prompts]
    calls = itertools.count()

    def scan(token_id: int) -> bool:
        if next(calls) == after:
            raise error
        return False

    keys = [
        engine.add(prompt, params, scan_stop=scan if index == failing else None)
        for index, prompt in enumerate(prompts)
    ]
    drafter.known = dict(zip(keys, (p.token_ids for p in plain), strict=True))
    outputs: dict[int, list[StepOutput]] = {key: [] for key in keys}
    num_raised = 0
    while engine.has_work:
        try:
            for output in engine.step():
                outputs[output.key].append(output)
        except type(error):
            num_raised += 1
    assert num_raised == isinstance(error, KeyboardInterrupt)
    for index, key in enumerate(keys):
        progress = engine.take(key)
        assert progress.finished_at is not None
        found = joined(outputs[key])
        assert found == progress.sequence.output_ids
        logprobs = [entry for output in outputs[key] for entry in output.logprobs]
        assert logprobs == plain[index].logprobs[: len(found)]
        acceptance = progress.acceptance
        assert acceptance.num_tokens == max(0, len(found) - 1)
        assert all(acceptance.accepted[at] <= acceptance.drafted[at] for at in range(5))
        if index == failing:
            assert found == plain[index].token_ids[: after + 1]
            assert progress.sequence.finish_reason == outputs[key][-1].finish_reason == "error"
            assert repr(error) in str(progress.sequence.error)
        else:
            assert found == plain[index].token_ids
            assert progress.sequence.finish_reason == "length"
    assert engine.failures.num_failures == engine.allocator.failures.num_failures == 0
    target.memory.check_integrity()
    assert target.memory.num_available == target.memory.num_pages - 1


@pytest.mark.parametrize(
    ("name", "after"), [("_observe", 1), ("_observe", 3), ("_count", 0), ("_count", 3)]
)
def test_a_step_whose_report_is_interrupted_counts_once(
    name: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the observer behind all counts, or behind the count of a row."""

    def decode() -> list[AcceptanceStats]:
        engine = Engine(TableTarget(TABLE), RandomDrafter(4, VOCAB_SIZE))
        keys = [engine.add(prompt, GREEDY) for prompt in ([1, 2], [3, 4])]
        while engine.has_work:
            with suppress(KeyboardInterrupt):
                engine.step()
        return [engine.take(key).acceptance for key in keys]

    expected = decode()
    calls, real = itertools.count(), getattr(Engine, name)

    def interrupted(*args: Any) -> None:
        real(*args)
        if next(calls) == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(Engine, name, interrupted)
    assert decode() == expected
    assert next(calls) > after


def test_what_was_committed_before_a_failure_goes_with_its_request() -> None:
    """A request that is taken away is not heard of again."""
    engine = Engine(TableTarget(TABLE), NoDrafter())

    def fail(token_id: int) -> bool:
        raise KeyboardInterrupt

    keys = [engine.add([1, 2], GREEDY), engine.add([3, 4], GREEDY, scan_stop=fail)]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.has_work
    for key in keys:
        engine.take(key)
    assert not engine.has_work


@pytest.mark.parametrize("takes_trees", [True, False])
def test_proposals_are_joined_to_trees_where_the_target_verifies_them(takes_trees: bool) -> None:
    target = TableTarget(TABLE)
    target.takes_trees = takes_trees
    engine = Engine(target, ConstantDrafter(3, 7))
    engine.use_fixed_drafting(15)
    assert engine.proposer.joins_trees == takes_trees
    engine.use_fixed_drafting(3)
    assert not engine.proposer.joins_trees


@pytest.mark.parametrize("has_ended", [True, False], ids=["ended", "aborted"])
def test_nothing_is_left_of_a_request_that_is_taken_away(has_ended: bool) -> None:
    target, closed = TableTarget(TABLE), list[int]()
    engine = Engine(target, ConstantDrafter(3, 7))
    engine.allocator.policy = policy = VerifyAll()
    policy.close = closed.append
    key = engine.add([1, 2], GREEDY)
    while engine.has_work and (has_ended or key not in target.cached):
        engine.step()
    assert (engine.take(key).sequence.finish_reason is not None) == has_ended
    assert closed == [key]
    assert not engine.progress
    assert not target.cached
    assert not engine.has_work


@pytest.mark.parametrize("way", WAYS)
def test_features_that_cannot_be_kept_end_the_drafts_of_their_request(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter has no room to keep the features of the second of three sequences."""
    target = make_target(way, tiny_target(dtype=torch.float64))
    drafter = make_dflash(target, tiny_drafter(torch.float64))
    engine = Engine(target, drafter)
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    expected = [generate_plain(target, prompt, GREEDY).token_ids for prompt in prompts]
    keys = [engine.add(prompt, GREEDY) for prompt in prompts]
    calls, real = itertools.count(), drafter.committed

    def committed(*args: Any) -> None:
        if next(calls) == 4:
            raise MemoryError
        real(*args)

    monkeypatch.setattr(drafter, "committed", committed)
    outputs = run(engine)
    assert engine.proposer.failures.num_failures == 1
    for index, (key, tokens) in enumerate(zip(keys, expected, strict=True)):
        sequence = engine.take(key).sequence
        assert joined(outputs[key]) == sequence.output_ids == tokens
        assert sequence.finish_reason == "length"
        assert sequence.has_lost_context == (index == 1)
        # The pass of the prompt drafts nothing.
        assert all(output.num_drafted == 0 for output in outputs[key][2:]) == (index == 1)
    assert not drafter._known


def test_a_forward_that_failed_is_made_again_with_fewer_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some layers of a sequential target have grown for drafts that nobody asks for any more."""
    target = make_target("sequential", tiny_target("gemma3"))
    prompt = list(range(60))
    expected = generate_plain(target, prompt, GREEDY).token_ids
    engine = Engine(target, ConstantDrafter(5, 7))
    key = engine.add(prompt, GREEDY)
    outputs = engine.step()
    calls, real = itertools.count(), KVLayer.update

    def update(self: KVLayer, *args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("boom")
        return real(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(KVLayer, "update", update)
        with pytest.raises(RuntimeError, match="boom"):
            engine.step()
    engine.use_fixed_drafting(0)
    assert joined(outputs + run(engine)[key]) == expected


ALL_IDS = tuple(range(VOCAB_SIZE))


def test_a_minimum_length_that_leaves_no_token_is_refused() -> None:
    engine = Engine(TableTarget(TABLE), NoDrafter())
    params = SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=ALL_IDS)
    with pytest.raises(RequestError, match="min_tokens is 4, and all 97 tokens") as refused:
        engine.limits.check_min_tokens(params, frozenset())
    assert refused.value.param == "min_tokens"
    params = SamplingParams(max_tokens=8, min_tokens=4, stop_token_ids=ALL_IDS[1:])
    with pytest.raises(RequestError, match="min_tokens is 4"):
        engine.limits.check_min_tokens(params, frozenset({0}))
    engine.limits.check_min_tokens(params, frozenset())
    # Who does not ask gets an error, and costs the others nothing.
    stuck = engine.add([1, 2], params, eos_ids=frozenset({0}))
    keys = [engine.add([1, 2], params), engine.add([3], GREEDY)]
    outputs = run(engine)
    assert outputs[stuck][-1].finish_reason == "error"
    assert "min_tokens is 4" in str(engine.take(stuck).sequence.error)
    assert [engine.take(key).sequence.error for key in keys] == [None, None]


@pytest.mark.parametrize("eos_id", [VOCAB_SIZE, -1])
def test_an_end_that_is_no_token_is_left_out(eos_id: int) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=2)
    engine = Engine(TableTarget(TABLE), NoDrafter())
    key = engine.add([1, 2], params, eos_ids=frozenset({eos_id}))
    expected = generate_plain(TableTarget(TABLE), [1, 2], params).token_ids
    assert joined(run(engine)[key]) == expected
    assert engine.progress[key].sequence.stop_ids == frozenset()


def test_the_largest_gap_is_between_tokens_and_not_before_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(engine_module, "perf_counter", lambda: clock[0])
    engine = Engine(TableTarget(TABLE), NoDrafter())
    key = engine.add([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    for seconds in (9.0, 0.5, 3.0, 0.25):
        clock[0] += seconds
        engine.step()
    record = engine.take(key)
    assert record.sequence.finish_reason == "length"
    assert record.largest_gap == 3.0
