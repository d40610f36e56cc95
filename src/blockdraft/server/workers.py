"""Threads for work that takes a while and cannot be interrupted. No torch."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from blockdraft.core.errors import Overloaded, RequestTimeout
from blockdraft.engine.fair_queue import FairQueue

_LOW_PRIORITY = 15

Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Task:
    """A piece of work for whoever is interested in it; `client` asked for it first."""

    client: str
    key: Hashable
    work: Callable[[], Any]
    result: asyncio.Future[Any]
    num_interested: int = 0
    has_begun: bool = False


class Workers:
    """A few threads, shared fairly among clients; each piece of work has a deadline.

    A thread cannot be stopped. Work that misses its deadline goes on in its thread, and counts as
    its client's until it ends. So a client has at most half of the threads: what one client asks
    for never takes all of them. For one event loop.

    Args:
        name: what is done, for messages: "tokenizing the prompt".
        num_threads: how much is done at once; for one client, half of it.
        max_waiting: how much may wait for a thread; more is refused.
        max_waiting_each: the same, of one client.
        seconds: the deadline, waiting included.
        remedy: what to do about work that takes longer.
        is_background: let everything else on this machine go first.
    """

    def __init__(
        self,
        name: str,
        *,
        num_threads: int,
        max_waiting: int,
        max_waiting_each: int,
        seconds: float,
        remedy: str,
        is_background: bool = False,
    ) -> None:
        self._name = name
        self._num_threads, self._num_each = num_threads, num_threads // 2
        self._max_waiting, self._max_waiting_each = max_waiting, max_waiting_each
        self._seconds = seconds
        self._remedy = remedy
        self._is_background = is_background
        self._waiting: FairQueue[_Task] = FairQueue()
        self._by_key: dict[Hashable, _Task] = {}
        self._num_busy = 0

    async def run(
        self, work: Callable[[], Result], client: str, *, key: Hashable | None = None
    ) -> Result:
        """Do the work in a thread; work with an equal key is done once for all who want it.

        Raises:
            Overloaded: too much waits already, or no thread was free until the deadline.
            RequestTimeout: it was begun and did not end in time.
            Exception: whatever the work raises.
        """
        task = self._find(work, client, key)
        task.num_interested += 1
        try:
            # Unlike wait_for, it leaves the result alone, for which others may wait.
            await asyncio.wait([task.result], timeout=self._seconds)
            if not task.result.done():
                raise self._late(task)
            result: Result = task.result.result()
            return result
        finally:
            task.num_interested -= 1
            if not task.num_interested and self._waiting.remove(task):
                self._by_key.pop(task.key, None)

    def _find(self, work: Callable[[], Any], client: str, key: Hashable | None) -> _Task:
        if key is not None and key in self._by_key:
            return self._by_key[key]
        self._check_room(client)
        result = asyncio.get_running_loop().create_future()
        task = _Task(client, object() if key is None else key, work, result)
        self._by_key[task.key] = task
        self._waiting.push(task)
        self._begin()
        return task

    def _check_room(self, client: str) -> None:
        num, num_own = len(self._waiting), self._waiting.num_of(client)
        if num >= self._max_waiting or num_own >= self._max_waiting_each:
            raise Overloaded(
                f"{num} requests wait for {self._name}, {num_own} of them yours; at most "
                f"{self._max_waiting} may wait, {self._max_waiting_each} per client; try again "
                "later",
                retry_after=1,
            )

    def _late(self, task: _Task) -> Overloaded | RequestTimeout:
        if not task.has_begun:
            return Overloaded(
                f"the request waited {self._seconds:g} s for {self._name}, because others take "
                "long; try again later",
                retry_after=max(1, round(self._seconds)),
            )
        return RequestTimeout(
            f"{self._name} takes longer than {self._seconds:g} s; {self._remedy}, or start the "
            "server with a longer --prepare-timeout"
        )

    def _begin(self) -> None:
        """Give free threads to those whose turn it is."""
        while self._num_busy < self._num_threads and self._waiting.can_pop(self._num_each):
            task = self._waiting.pop()
            task.has_begun = True
            self._num_busy += 1
            # Nobody waits for a daemon when the server ends, however long its work takes.
            thread = threading.Thread(target=self._work, args=(task,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no further thread now
                task.result.get_loop().call_soon(self._end, task, None, error)

    def _work(self, task: _Task) -> None:
        """What a thread does."""
        result, error = None, None
        try:
            if self._is_background:
                _lower_priority()
            result = task.work()
        except Exception as caught:
            error = caught
        # A panic of a library in Rust is no Exception; the thread's place must become free.
        except BaseException as caught:
            error = RuntimeError(f"{self._name} ended with {caught!r}")
        with suppress(RuntimeError):  # the event loop has ended: nobody waits any more
            task.result.get_loop().call_soon_threadsafe(self._end, task, result, error)

    def _end(self, task: _Task, result: Any, error: Exception | None) -> None:
        self._num_busy -= 1
        self._waiting.release(task)
        self._by_key.pop(task.key, None)
        if error is None:
            task.result.set_result(result)
        elif task.num_interested:
            task.result.set_exception(error)
        self._begin()


def _lower_priority() -> None:
    """Of the calling thread; elsewhere than on Linux it would be that of the whole process."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        # Nobody may raise what `nice` has set lower.
        with suppress(OSError):  # a sandbox may forbid it, and the work can do without
            lowest = max(_LOW_PRIORITY, os.getpriority(os.PRIO_PROCESS, thread))
            os.setpriority(os.PRIO_PROCESS, thread, lowest)
