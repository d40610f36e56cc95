"""Threads for slow work: deadlines, turns, and no client that takes them all."""

import asyncio
import threading
import time

import pytest

from blockdraft.core.errors import Overloaded, RequestTimeout
from blockdraft.server.workers import Workers

PATIENCE = 30.0


def make(**options):
    fields = {"num_threads": 4, "max_waiting": 8, "max_waiting_each": 6, "seconds": PATIENCE}
    return Workers("the work", remedy="do less", **{**fields, **options})


@pytest.fixture
def gate():
    gate = threading.Event()
    yield gate
    gate.set()


def run(story):
    return asyncio.run(asyncio.wait_for(story, PATIENCE))


def test_it_returns_what_the_work_returns_or_raises():
    async def story():
        workers = make()
        assert await workers.run(lambda: threading.current_thread().name, "a") == "the work"
        with pytest.raises(KeyError):
            await workers.run({}.popitem, "a")
        assert await workers.run(lambda: 3, "a") == 3

    run(story())


class Panic(BaseException):
    """As libraries in Rust raise it."""


def test_a_panic_is_an_error_and_takes_no_thread_away():
    def panic():
        raise Panic("unwrap on None")

    async def story():
        workers = make(num_threads=2)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"the work ended with .*unwrap on None"):
                await workers.run(panic, "a")
        assert await workers.run(lambda: 3, "a") == 3

    run(story())


def test_a_thread_that_does_not_start_takes_no_place_away(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    async def story():
        workers = make(num_threads=2)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            tries = [workers.run(lambda: 3, "a") for _ in range(5)]
            for found in await asyncio.gather(*tries, return_exceptions=True):
                assert str(found) == "can't start new thread"
        assert await workers.run(lambda: 3, "a") == 3

    run(story())


def test_work_is_done_where_priorities_may_not_be_set(monkeypatch):
    def forbid(*_):
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr("os.setpriority", forbid)

    async def story():
        assert await make(is_background=True).run(lambda: 3, "a") == 3

    run(story())


def test_a_client_has_half_of_the_threads_even_when_its_work_cannot_be_stopped(gate):
    async def story():
        workers = make(seconds=0.1)
        slow = [workers.run(gate.wait, "slow") for _ in range(4)]
        ended = await asyncio.gather(*slow, return_exceptions=True)
        assert [type(error) for error in ended] == 2 * [RequestTimeout] + 2 * [Overloaded]
        assert "0.1 s" in str(ended[0])
        assert "do less" in str(ended[0])
        assert "--prepare-timeout" in str(ended[0])
        # Their threads are still taken; the others are not.
        with pytest.raises(Overloaded):
            await workers.run(lambda: 1, "slow")
        assert await workers.run(lambda: 1, "other") == 1
        gate.set()
        while workers._num_busy:
            await asyncio.sleep(0.001)
        assert await workers.run(lambda: 1, "slow") == 1
        assert not workers._by_key

    run(story())


def test_only_so_much_waits(gate):
    async def story():
        workers = make(max_waiting=4, max_waiting_each=3)
        slow = [asyncio.ensure_future(workers.run(gate.wait, "a")) for _ in range(2 + 3)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="3 per client"):
            await workers.run(lambda: 1, "a")
        slow += [asyncio.ensure_future(workers.run(gate.wait, "b")) for _ in range(2 + 1)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="at most 4"):
            await workers.run(lambda: 1, "c")
        gate.set()
        assert await asyncio.gather(*slow) == [True] * 8

    run(story())


def test_who_leaves_waits_no_more(gate):
    async def story():
        workers, done = make(), []
        slow = [asyncio.ensure_future(workers.run(gate.wait, "a")) for _ in range(2)]
        waiting = asyncio.ensure_future(workers.run(lambda: done.append(1), "a"))
        await asyncio.sleep(0.01)
        waiting.cancel()
        slow[0].cancel()
        await asyncio.gather(waiting, slow[0], return_exceptions=True)
        assert not len(workers._waiting)
        gate.set()
        assert await slow[1]
        assert not done

    run(story())


def test_equal_work_is_done_once_for_all_who_want_it(gate):
    async def story():
        workers, calls = make(), []

        def work():
            calls.append(1)
            gate.wait()
            raise KeyError("once")

        first = asyncio.ensure_future(workers.run(work, "a", key="k"))
        others = [asyncio.ensure_future(workers.run(work, "b", key="k")) for _ in range(20)]
        await asyncio.sleep(0.01)
        first.cancel()
        gate.set()
        ended = await asyncio.gather(*others, return_exceptions=True)
        assert [type(error) for error in ended] == [KeyError] * 20
        assert len(calls) == 1
        with pytest.raises(KeyError):
            await workers.run(work, "a", key="k")
        assert len(calls) == 2

    run(story())


def test_work_in_the_background_yields_to_the_rest():
    import os
    import sys

    if sys.platform != "linux":
        pytest.skip("threads have priorities of their own on Linux only")

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def story():
        assert await make(is_background=True).run(priority, "a") == max(15, priority())
        assert await make().run(priority, "a") == priority()

    run(story())


def test_nobody_waits_for_a_thread_at_the_end(gate):
    async def story():
        with pytest.raises(RequestTimeout):
            await make(seconds=0.05).run(gate.wait, "a")

    started = time.monotonic()
    run(story())
    assert time.monotonic() - started < 10
    assert all(t.daemon for t in threading.enumerate() if t.name == "the work")
    gate.set()  # its event loop has ended: nothing is to be told
