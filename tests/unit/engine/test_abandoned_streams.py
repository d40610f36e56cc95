"""Streams that nobody closes: the garbage collector ends them, in the middle of anything."""

import gc
import signal
import threading
from operator import attrgetter

import pytest

from tests.small_llm import assert_nothing_left, params


class Reader:
    """Holds its stream and is part of a reference cycle."""

    def __init__(self, llm):
        self.stream = llm.generate("the fox", params(max_tokens=200), stream=True)
        next(self.stream)
        self.me = self


@pytest.fixture
def no_collector():
    """Only the test says when garbage is collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


PLACES = ("schedule", "forward", "commit", "add", "take", "remove")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("place", PLACES)
def test_a_stream_that_is_collected_at_any_moment_costs_others_nothing(
    llm, place, no_collector, monkeypatch
):
    expected = llm.generate("abc", params()).completions[0]
    engine = llm.engine
    owner, name = {
        "schedule": (engine.scheduler, "_chunk"),
        "forward": (engine.target, "forward"),
        "commit": (engine.target.memory, "publish"),
        "add": (engine.scheduler, "add"),
        "take": (engine.allocator.policy, "close"),
        "remove": (engine.scheduler, "remove"),
    }[place]
    real = getattr(owner, name)
    Reader(llm)
    num_open = len(llm.engine.progress)
    assert num_open == 1

    def collecting(*args, **options):
        gc.collect()
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, collecting)
        found = llm.generate("abc", params()).completions[0]
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    # Nothing waits for another step.
    assert_nothing_left(llm)


@pytest.mark.one_in(4)
def test_a_stream_that_another_thread_collects_costs_others_nothing(llm, no_collector, monkeypatch):
    expected = llm.generate("abc", params()).completions[0].token_ids
    real = llm.engine.target.forward
    Reader(llm)

    def forward(plan):
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join(timeout=20.0)
        assert not other.is_alive(), "the collector waits for the step"
        return real(plan)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", forward)
        assert llm.generate("abc", params()).completions[0].token_ids == expected
    assert_nothing_left(llm)


def test_a_stream_that_is_collected_between_steps_is_gone_at_once(llm, no_collector):
    Reader(llm)
    assert llm.samples.open
    gc.collect()
    assert_nothing_left(llm)


def interrupt(monkeypatch, owner, name, *, after):
    """Ctrl-C in the next call of a method: after its work, or before it."""
    real = getattr(owner, name)

    def interrupted(*args, **options):
        monkeypatch.undo()
        if not after:
            signal.raise_signal(signal.SIGINT)
        found = real(*args, **options)
        if after:
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(owner, name, interrupted)


LONG = "the fox " * 40
"""Of several pages."""
PLACES_OF_INTERRUPTS = {
    "taken": ("engine.allocator.policy", "close"),
    "pages": ("engine.target.memory", "_release"),
    "added": ("engine.scheduler", "add"),
}


@pytest.mark.parametrize("place", PLACES_OF_INTERRUPTS)
def test_an_interrupt_while_memory_is_given_back_loses_none(llm, place, monkeypatch):
    expected = llm.generate(LONG, params()).completions[0].token_ids
    path, name = PLACES_OF_INTERRUPTS[place]
    owner = attrgetter(path)(llm)
    if not hasattr(owner, name):
        pytest.skip("the target has no pages")
    interrupt(monkeypatch, owner, name, after=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(LONG, params())
    assert_nothing_left(llm)
    assert llm.generate(LONG, params()).completions[0].token_ids == expected


def test_an_interrupt_while_one_is_preempted_costs_others_nothing(llm, monkeypatch):
    expected = llm.generate(LONG, params()).completions[0].token_ids
    stream = llm.generate(LONG, params(), stream=True)
    found = list(next(stream).token_ids)
    scheduler = llm.engine.scheduler
    interrupt(monkeypatch, scheduler, "_release", after=True)
    with pytest.raises(KeyboardInterrupt):
        scheduler.preempt(scheduler.running[-1])
    for chunk in stream:
        found += chunk.token_ids
    assert tuple(found) == tuple(expected)
    assert_nothing_left(llm)


PLACES_IN_A_STEP = {
    "its end": ("engine.timer", "_split"),
    "its report": ("engine", "_count"),
    "its text": ("samples", "_text"),
}


@pytest.mark.parametrize("place", PLACES_IN_A_STEP)
def test_an_interrupt_where_a_step_ends_takes_no_tokens_from_others(llm, place, monkeypatch):
    expected = llm.generate(LONG, params()).completions[0].token_ids
    stream = llm.generate(LONG, params(), stream=True)
    found = list(next(stream).token_ids)
    path, name = PLACES_IN_A_STEP[place]
    interrupt(monkeypatch, attrgetter(path)(llm), name, after=False)
    with pytest.raises(KeyboardInterrupt):
        llm.samples.step()
    for chunk in stream:
        found += chunk.token_ids
    assert tuple(found) == tuple(expected)
    assert_nothing_left(llm)


def test_an_interrupt_while_a_sample_is_dropped_leaves_nothing_of_it(llm, monkeypatch):
    stream = llm.generate(LONG, params(), stream=True)
    next(stream)
    interrupt(monkeypatch, llm.engine.allocator.policy, "close", after=False)
    with pytest.raises(KeyboardInterrupt):
        llm.samples.drop(*llm.engine.progress)
    stream.close()
    assert_nothing_left(llm)


def test_what_is_abandoned_in_a_step_that_fails_is_gone_too(llm, no_collector, monkeypatch):
    Reader(llm)

    def forward(plan):
        gc.collect()
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.target, "forward", forward)
        with pytest.raises(RuntimeError, match="boom"):
            llm.generate("abc", params())
    assert_nothing_left(llm)
