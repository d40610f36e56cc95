"""HTTP answers that stop their work when nobody reads them any more. No torch."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

KEEP_ALIVE_SECONDS = 10.0
"""A stream is never silent for longer: proxies and clients close what seems dead."""
_COMMENT = b": keep-alive\n\n"
_ENDS_OF_LINES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
"""They end no line of an event, but many clients take them for that (httpx's iter_lines)."""

SLOW_READER_SECONDS = 5.0
"""A reader gets so much longer than the request may take, to fetch the end of a stream."""

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """The client has left before it got its answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do the work, and stop it as soon as the client leaves.

    Raises:
        ClientGone: it has left; whatever the work raises.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_leaves(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await _end(working, leaving)


async def _leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events, one JSON object each, and comments while it waits.

    `[DONE]` ends those whose events have no names.

    Args:
        events: what is sent.
        failure: the event that tells of an exception that `events` raised.
        close: ends the work behind the events, however the answer ends; may be called again.
        seconds: after so long, and a little for slow readers, the connection is given up.
        names_events: events are named by their `type`.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        *,
        failure: Callable[[BaseException], dict[str, Any]],
        close: Callable[[], None],
        seconds: float,
        names_events: bool = False,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._failure = failure
        self._close = close
        self._seconds = seconds + SLOW_READER_SECONDS
        self._names_events = names_events
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; an ASGI application."""
        writer = _Writer(send)
        sending = asyncio.ensure_future(self._send(writer))
        waiting = asyncio.ensure_future(writer.keep_alive())
        leaving = asyncio.ensure_future(_leaves(receive))
        try:
            await asyncio.wait(
                {sending, leaving}, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if sending.done():
                sending.result()
        except OSError:
            logger.debug("a client disconnected in the middle of its stream")
        finally:
            self._close()
            await _end(sending, leaving, waiting)

    async def _send(self, writer: "_Writer") -> None:
        await writer.start(self.raw_headers)
        async for data in self._lines():
            await writer.write(data)
        await writer.finish()

    async def _lines(self) -> AsyncIterator[bytes]:
        try:
            async for event in self._events:
                yield self._line(event)
        # The status is sent already: whatever fails can only be told as the last event.
        except Exception as error:
            yield self._line(self._failure(error))
            return
        if not self._names_events:
            yield b"data: [DONE]\n\n"

    def _line(self, event: dict[str, Any]) -> bytes:
        name = f"event: {event['type']}\n" if self._names_events else ""
        data = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        return f"{name}data: {data.translate(_ENDS_OF_LINES)}\n\n".encode()


class _Writer:
    """Sends a response piece by piece, and a comment whenever nothing was sent for a while."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._is_open = False
        self._sent_at = -math.inf

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Send status and headers."""
        async with self._lock:
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._is_open, self._sent_at = True, _now()

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        async with self._lock:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
            self._sent_at = _now()
            # Of many events at once: else the loop goes on writing to a client that has left, and
            # others wait.
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Send the end of the body."""
        async with self._lock:
            self._is_open = False
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def keep_alive(self) -> None:
        """Send comments, until cancelled."""
        wait = KEEP_ALIVE_SECONDS
        while True:
            await asyncio.sleep(wait)
            wait = self._sent_at + KEEP_ALIVE_SECONDS - _now()
            if wait <= 0:
                if self._is_open:
                    await self.write(_COMMENT)
                wait = KEEP_ALIVE_SECONDS


def _now() -> float:
    return asyncio.get_running_loop().time()
