"""The engine under asyncio: what goes in and out of its thread, and what is left behind."""

import asyncio
import itertools
from contextlib import contextmanager
from dataclasses import replace

import pytest

from blockdraft import RequestError
from blockdraft.core.errors import EngineDead, Overloaded
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.engine.samples import Job
from blockdraft.measure.step_report import Pace
from tests.small_llm import MAX_TOKENS, PATIENCE, Gate, assert_nothing_left, load_llm, params


class Reports:
    def __init__(self):
        self.all = []

    def on_step(self, report):
        self.all.append(report)


@pytest.fixture(scope="module")
def small(folders):
    return load_llm(folders, max_concurrency=4)


@contextmanager
def serving(llm, **options):
    engine = AsyncEngine(llm.samples, **{"max_waiting": 64, **options})
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        assert_nothing_left(llm)


def job(llm, text, index=0, **changes):
    wanted = params(**{"seed": 1, **changes})
    return Job(index, llm.tokenizer.encode(text), wanted, wanted.seed)


async def read(stream):
    with stream:
        chunks = [chunk async for chunk in stream]
    return {(c.prompt_index, c.index): c.completion for c in chunks if c.completion}, chunks


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def assert_no_place_is_taken(engine):
    """A client whose places were not given back would be served last for ever."""
    assert not engine._queue._num_running


def test_requests_in_a_batch_get_what_each_gets_alone(small):
    wanted = {"temperature": 0.8, "n": 2, "logprobs": 1}
    texts = ["abc", "the fox", "!!", "the the", "a b c d", "zzz"]
    expected = [small.generate(text, params(seed=1, **wanted)) for text in texts]

    async def batched():
        with serving(small) as engine:
            streams = [engine.submit([job(small, text, **wanted)]) for text in texts]
            found = await asyncio.gather(*map(read, streams))
            assert_no_place_is_taken(engine)
            return found

    for generation, (found, chunks) in zip(expected, run(batched()), strict=True):
        for completion in generation.completions:
            same = found[0, completion.index]
            assert (same.token_ids, same.text) == (completion.token_ids, completion.text)
            assert same.logprobs == completion.logprobs
            own = [chunk for chunk in chunks if chunk.index == completion.index]
            assert "".join(chunk.text for chunk in own) == completion.text
            assert sum((chunk.logprobs for chunk in own), ()) == completion.logprobs


def test_several_prompts_are_one_stream(small):
    async def both():
        with serving(small) as engine:
            return await read(engine.submit([job(small, "abc", 0), job(small, "the fox", 1)]))

    found, _ = run(both())
    assert found[0, 0].token_ids == small.generate("abc", params()).completions[0].token_ids
    assert found[1, 0].token_ids == small.generate("the fox", params()).completions[0].token_ids


def test_a_closed_stream_stops_within_a_step_and_frees_its_pages(small, monkeypatch):
    gate = Gate(small, monkeypatch)

    async def leave():
        with serving(small) as engine:
            stream = engine.submit([job(small, "abc", max_tokens=400, n=3)])
            gate.let(2)
            await anext(stream)
            await until(lambda: gate.num_steps == 2)
            stream.close()
            gate.let(1)  # the thread may stand at the gate already
            await until(lambda: not engine.load().num_running)
            assert_nothing_left(small)
            assert_no_place_is_taken(engine)
            gate.let(1)
            await asyncio.sleep(0.05)
            assert gate.num_steps <= 3
            gate.let(1000)
            found, _ = await read(engine.submit([job(small, "abc")]))
            return found[0, 0]

    assert run(leave()).token_ids == small.generate("abc", params()).completions[0].token_ids


def test_a_stream_that_is_closed_while_it_waits_never_runs(small, monkeypatch):
    gate = Gate(small, monkeypatch)

    async def leave():
        with serving(small) as engine:
            first = engine.submit([job(small, "abc", n=4)])
            gate.let(1)
            await until(lambda: engine.load().num_running == 4)
            second = engine.submit([job(small, "the", n=5)])
            assert engine.load().num_waiting == 5
            second.close()
            second.close()
            assert engine.load().num_waiting == 0
            gate.let(1000)
            return await read(first)

    found, _ = run(leave())
    assert len(found) == 4


def test_a_full_queue_refuses_and_says_when_to_come_back(small, monkeypatch):
    gate = Gate(small, monkeypatch)

    async def flood():
        with serving(small, max_waiting=3) as engine:
            with pytest.raises(Overloaded, match="0 samples wait, 8 more were requested"):
                engine.submit([job(small, "abc", n=8)])
            streams = [engine.submit([job(small, "abc", n=7)])]
            gate.let(1)
            await until(lambda: engine.load().num_running == 4)
            with pytest.raises(Overloaded, match="at most 3 may wait") as refused:
                engine.submit([job(small, "abc")])
            assert 1 <= refused.value.retry_after <= 60
            gate.let(1000)
            await asyncio.gather(*map(read, streams))
            return await read(engine.submit([job(small, "abc")]))

    assert run(flood())[0]


def test_room_is_held_while_a_request_is_prepared(small):
    async def prepare():
        with serving(small, max_waiting=1) as engine:
            most = engine.max_running + 1
            with engine.hold(most):
                assert engine.load().num_preparing == most
                assert not engine.has_room
            assert engine.load().num_preparing == 0
            assert engine.has_room

    run(prepare())


def test_a_client_with_many_requests_does_not_starve_another(small, monkeypatch):
    gate, ends = Gate(small, monkeypatch), []

    async def note(name, stream):
        await read(stream)
        ends.append(name)

    async def both():
        with serving(small) as engine:
            many = [engine.submit([job(small, "abc")], client="many") for _ in range(20)]
            few = [engine.submit([job(small, "the")], client="few") for _ in range(2)]
            gate.let(10_000)
            named = [("many", stream) for stream in many] + [("few", stream) for stream in few]
            await asyncio.gather(*(note(*pair) for pair in named))

    run(both())
    assert max(i for i, name in enumerate(ends) if name == "few") < 8


def test_bad_requests_are_refused_at_once(small):
    async def ask():
        with serving(small) as engine:
            with pytest.raises(RequestError, match="the prompt is empty"):
                engine.submit([Job(0, [], params(), 1)])
            with pytest.raises(RequestError, match="outside the vocabulary") as refused:
                engine.submit([job(small, "abc", logit_bias={10**6: 1.0})])
            assert refused.value.param == "logit_bias"
            return await read(engine.submit([job(small, "abc")]))

    assert run(ask())[0]


def fail_steps(llm, monkeypatch, failing):
    real, calls = llm.engine.target.forward, itertools.count()

    def forward(*args):
        if next(calls) in failing:
            raise RuntimeError("boom")
        return real(*args)

    monkeypatch.setattr(llm.engine.target, "forward", forward)


def test_a_step_that_fails_is_tried_again(small, monkeypatch, caplog):
    expected = small.generate("abc", params()).completions[0].token_ids
    fail_steps(small, monkeypatch, {0, 2, 3, 5})

    async def ask():
        with serving(small) as engine:
            return await read(engine.submit([job(small, "abc")]))

    assert run(ask())[0][0, 0].token_ids == expected
    assert "a step failed; retrying (4 so far)" in caplog.text


def test_reports_that_fail_end_nobody(small, monkeypatch):
    class Failing:
        def on_step(self, report):
            raise RuntimeError("boom")

    async def ask():
        with serving(small, observer=Failing()) as engine:
            found, _ = await read(engine.submit([job(small, "abc")]))
            assert engine.death is None
            return found[0, 0]

    expected = small.generate("abc", params()).completions[0]
    assert run(ask()).token_ids == expected.token_ids


def test_a_chunk_that_cannot_be_made_ends_its_own_stream_alone(small, monkeypatch):
    real = small.samples.take_chunk

    def take_chunk(key):
        if len(small.engine.progress[key].sequence.prompt_ids) > 3:
            raise RuntimeError("boom")
        return real(key)

    async def ask():
        with serving(small) as engine:
            streams = [engine.submit([job(small, text)]) for text in ("abc", "the fox jumps")]
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert engine.death is None
            assert not engine.load().num_running
            assert_no_place_is_taken(engine)
            return found

    expected = small.generate("abc", params()).completions[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(small.samples, "take_chunk", take_chunk)
        (found, _), failure = run(ask())
    assert found[0, 0].token_ids == expected
    assert repr(failure) == "RuntimeError('boom')"


POISON = "zzz zzz"
TEXTS = ("abc", POISON, "the fox", "a b c d", "!!")


def poison(llm, monkeypatch, is_poisoned):
    """A pass of the target fails if it holds a row of a poisoned sequence; returns how many did."""
    real, failed = llm.engine.target.forward, []

    def forward(plan):
        if any(is_poisoned(planned.row.sequence) for planned in plan):
            failed.append(len(list(plan)))
            raise RuntimeError("boom")
        return real(plan)

    monkeypatch.setattr(llm.engine.target, "forward", forward)
    return failed


async def read_all(llm, texts, **changes):
    with serving(llm) as engine:
        streams = [engine.submit([job(llm, text, **changes)]) for text in texts]
        ends = [(await read(stream))[0][0, 0] for stream in streams]
        assert engine.death is None
        assert_no_place_is_taken(engine)
        return ends


@pytest.mark.parametrize("begins_at", [0, 5], ids=["in its prompt", "while it decodes"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9}], ids=["greedy", "sampled"])
def test_a_request_with_which_steps_fail_ends_alone(small, monkeypatch, begins_at, settings):
    plain = [
        small.generate(text, params(seed=1, num_draft_tokens=0, **settings)).completions[0]
        for text in TEXTS
    ]
    poison_ids = small.tokenizer.encode(POISON)

    def is_poisoned(sequence):
        return (
            sequence.token_ids[: sequence.num_prompt] == poison_ids
            and sequence.num_output >= begins_at
        )

    with monkeypatch.context() as patch:
        failed = poison(small, patch, is_poisoned)
        ends = run(read_all(small, TEXTS, **settings))
    assert len(failed) == 4, "three steps in a row, and that of the request alone"
    assert failed[-1] == 1
    for text, expected, end in zip(TEXTS, plain, ends, strict=True):
        if text == POISON:
            assert end.error == "the server failed on this request; the log says why"
            assert end.token_ids == expected.token_ids[: len(end.token_ids)]
            assert len(end.token_ids) >= begins_at
        else:
            assert (end.token_ids, end.text) == (expected.token_ids, expected.text)


def test_requests_that_all_fail_end_and_the_next_is_answered(small, monkeypatch):
    expected = small.generate("the fox", params()).completions[0].token_ids
    fox = small.tokenizer.encode("the fox")
    failed = poison(
        small,
        monkeypatch,
        lambda sequence: sequence.params.max_tokens > 1 and sequence.token_ids[: len(fox)] != fox,
    )

    async def ask():
        with serving(small) as engine:
            streams = [engine.submit([job(small, "abc", n=3)]) for _ in range(3)]
            ends = [completion for s in streams for completion in (await read(s))[0].values()]
            assert_nothing_left(small)
            found, _ = await read(engine.submit([job(small, "the fox")]))
            assert engine.death is None
            return ends, found[0, 0]

    ends, after = run(ask())
    assert [end.finish_reason for end in ends] == ["error"] * 9
    assert after.token_ids == expected
    assert failed


def test_steps_that_fail_with_several_requests_only_end_none(small, monkeypatch, caplog):
    texts = ("abc", "the fox", "!!")
    expected = [small.generate(text, params(seed=1)).completions[0].token_ids for text in texts]
    real = small.engine.target.forward

    def forward(plan):
        if len(list(plan)) > 1 or any(planned.proposal for planned in plan):
            raise RuntimeError("boom")
        return real(plan)

    monkeypatch.setattr(small.engine.target, "forward", forward)
    ends = run(read_all(small, texts))
    assert [end.token_ids for end in ends] == expected
    assert caplog.text.count("Traceback") < 20, "a failure of every step must not fill the log"


def test_a_failed_request_whose_memory_cannot_be_freed_ends_no_other(small, monkeypatch):
    expected = small.generate("abc", params(seed=1)).completions[0].token_ids
    poison_ids, real = small.tokenizer.encode(POISON), small.engine._forget

    def is_poisoned(sequence):
        return sequence.token_ids[: sequence.num_prompt] == poison_ids

    def forget(sequence):
        real(sequence)
        if is_poisoned(sequence):
            raise RuntimeError("boom")

    poison(small, monkeypatch, is_poisoned)
    monkeypatch.setattr(small.engine, "_forget", forget)

    async def ask():
        with serving(small) as engine:
            streams = [engine.submit([job(small, text)]) for text in ("abc", POISON)]
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert engine.death is None
            assert_no_place_is_taken(engine)
            return found

    (found, _), failure = run(ask())
    assert found[0, 0].token_ids == expected
    assert isinstance(failure, RuntimeError)


def test_a_full_engine_that_is_broken_ends(small, monkeypatch):
    """The request of its own starts where all places are taken."""
    fail_steps(small, monkeypatch, set(range(4, 1000)))

    async def ask():
        with serving(small) as engine:
            stream = engine.submit([job(small, "abc", n=4)])
            with pytest.raises(EngineDead):
                await read(stream)

    run(ask())
    assert_nothing_left(small)


def test_a_dead_engine_says_so_to_everybody(small, monkeypatch):
    fail_steps(small, monkeypatch, set(range(3, 1000)))
    heard = []

    async def ask():
        with serving(small) as engine:
            engine.on_death = heard.append
            streams = [engine.submit([job(small, "abc", n=3)]) for _ in range(3)]
            ends = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert all(isinstance(end, EngineDead) and "log says why" in str(end) for end in ends)
            assert all("boom" not in str(end) for end in ends), "it may name files"
            assert engine.death is not None
            with pytest.raises(EngineDead, match="log says why"):
                engine.submit([job(small, "abc")])
            death = engine.death
        assert heard == [death]

    run(ask())


def test_stopping_ends_what_is_open(small, monkeypatch):
    gate = Gate(small, monkeypatch)

    async def ask():
        with serving(small) as engine:
            engine.on_death = pytest.fail
            stream = engine.submit([job(small, "abc", n=6)])
            gate.let(1)
            await anext(stream)
            gate.let(1000)
            engine.stop()
            with pytest.raises(EngineDead, match="shutting down"):
                await read(stream)

    run(ask())


def test_a_sample_that_cannot_start_costs_nobody_else(small, monkeypatch):
    real, calls = small.samples.add, itertools.count()

    def add(*args, **options):
        if next(calls) == 1:
            raise MemoryError
        return real(*args, **options)

    monkeypatch.setattr(small.samples, "add", add)

    async def ask():
        with serving(small) as engine:
            streams = [engine.submit([job(small, "abc")]) for _ in range(3)]
            found = await asyncio.gather(*map(read, streams), return_exceptions=True)
            assert_no_place_is_taken(engine)
            return found

    ends = run(ask())
    assert [isinstance(end, MemoryError) for end in ends] == [False, True, False]


def test_nobody_reads_when_the_event_loop_is_gone(small, monkeypatch):
    gate = Gate(small, monkeypatch)
    engine = AsyncEngine(small.samples, max_waiting=8)
    engine.start()

    async def ask():
        engine.submit([job(small, "abc", max_tokens=400)])

    run(ask())
    gate.let(1000)
    asyncio.run(until(lambda: not engine.load().num_running))
    assert gate.num_steps < 10
    engine.stop()
    assert_nothing_left(small)


def test_reports_add_up(small):
    reports = Reports()

    async def ask():
        with serving(small, observer=reports) as engine:
            jobs = [job(small, "abc", i, num_draft_tokens=(None, 0)[i % 2]) for i in range(6)]
            return await read(engine.submit(jobs))

    found, _ = run(ask())
    stats = [completion.acceptance for completion in found.values()]
    passes = sum((report.passes for report in reports.all), start=type(reports.all[0].passes)())
    assert passes.total() == sum(s.num_passes for s in stats)
    assert sum(r.num_pass_tokens for r in reports.all) == sum(s.num_tokens for s in stats)
    assert sum(d * n for (d, _), n in passes.items()) == sum(s.drafted.total() for s in stats) > 0
    assert sum(a * n for (_, a), n in passes.items()) == sum(s.accepted.total() for s in stats)
    assert sum(r.num_tokens for r in reports.all) == 6 * MAX_TOKENS
    assert sum(r.num_prompt_tokens for r in reports.all) == 6 * len(small.tokenizer.encode("abc"))
    assert sum(len(r.gaps) for r in reports.all) == passes.total()
    assert sum(r.phases.num_steps for r in reports.all) == len(reports.all)
    assert reports.all[0].has_prompt
    assert not reports.all[-1].has_prompt


def test_what_an_earlier_request_computed_is_reported_as_reused(small):
    async def ask():
        with serving(small) as engine:
            text = "the quick brown fox " * 20
            first, _ = await read(engine.submit([job(small, text)]))
            second, _ = await read(engine.submit([job(small, text)]))
            return first[0, 0], second[0, 0], len(small.tokenizer.encode(text))

    first, second, num_tokens = run(ask())
    assert (first.num_reused_tokens, second.num_reused_tokens) == (0, num_tokens // 64 * 64)
    assert second.num_reused_tokens > 0
    assert first.token_ids == second.token_ids
    assert replace(first.timings, queue=0.0) != first.timings


def test_a_pace_finds_stalls():
    pace, now = Pace(0.0), 0.0
    for _ in range(10):
        now += 1.0
        assert pace.note(now) == (1.0, False)
    assert pace.note(now + 2.5) == (2.5, False)
    assert pace.note(now + 2.5 + 3.5) == (3.5, True)
    assert Pace(0.0).note(100.0) == (100.0, False)
