"""Requests as the event loop sees them: streams of chunks, which the engine's thread fills."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from blockdraft.engine.completion import Chunk
from blockdraft.engine.samples import Job
from blockdraft.measure.step_report import Pace


@dataclass(eq=False, slots=True)
class Ticket:
    """One sample of a stream: it waits while `key` is None, and then runs under that key."""

    stream: "Stream"
    job: Job
    sample_index: int
    added_at: float
    key: int | None = None
    started_at: float = 0.0
    pace: Pace | None = None

    @property
    def client(self) -> str:
        """See FairQueue."""
        return self.stream.client


@dataclass(eq=False, slots=True)
class Stream:
    """The chunks of one request, all its samples mixed, as they come: an async iterator.

    `close` ends what is unfinished; it must be called, `with stream:` does so. `tickets` are its
    samples.
    """

    client: str
    _loop: asyncio.AbstractEventLoop
    _cancel: Callable[["Stream"], None]
    _num_open: int
    _inbox: asyncio.Queue[Chunk | Exception] = field(default_factory=asyncio.Queue)
    tickets: list[Ticket] = field(default_factory=list)
    _is_closed: bool = False

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk.

        Raises:
            EngineDead: the engine has ended, by a failure or because it was stopped.
        """
        if self._num_open == 0:
            raise StopAsyncIteration
        item = await self._inbox.get()
        if isinstance(item, Exception):
            self._num_open = 0
            raise item
        if item.completion is not None:
            self._num_open -= 1
        return item

    @property
    def has_begun(self) -> bool:
        """False while all of its samples wait for a place."""
        return any(ticket.key is not None for ticket in self.tickets)

    def close(self) -> None:
        """End the samples that are unfinished; the engine does so before its next step."""
        if not self._is_closed:
            self._is_closed = True
            self._cancel(self)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def deliver(self, item: Chunk | Exception) -> None:
        """Hand over a chunk, or why none follows; in any thread."""
        try:
            self._loop.call_soon_threadsafe(self._inbox.put_nowait, item)
        except RuntimeError:  # the event loop has been closed: nobody reads any more
            self.close()
