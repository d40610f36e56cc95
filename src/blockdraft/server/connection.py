"""Connections that rest are closed, or they would use up the process's files and memory."""

import asyncio
import ipaddress
from contextlib import suppress

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection of uvicorn's, which itself bounds only the rest between two requests.

    So long it may also take to bring one: from its opening, or from the first byte after a rest, to
    the end of the head. The body has a limit of its own (`guard.BODY_SECONDS`).

    A client that was sent more than it reads must fetch some of it in the same time, or a little
    more: else its answer would stay in memory, and its connection open, until it leaves by itself.
    """

    _deadline: asyncio.TimerHandle | None = None
    _next_look: asyncio.TimerHandle | None = None
    _num_unread: int | None = None
    """Bytes that waited for the client at the last look, unless it has read since."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # type: ignore[arg-type]
        if self.client is not None:
            self.client = (_plain(self.client[0]), self.client[1])
        self._await_request()
        self._look_at_reader()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        # Behind a request some clients send the end of a line. It is no request, and must cost
        # neither the answer to the first nor the next one (RFC 9112, 2.2).
        if self.conn.their_state is h11.MUST_CLOSE:
            return
        is_between = self.conn.their_state in (h11.IDLE, h11.DONE)
        if data[:1] in (b"\r", b"\n") and is_between and not self.conn.trailing_data[0]:
            data = data.lstrip(b"\r\n")
            if not data:
                return
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._await_request()

    def handle_events(self) -> None:
        """See H11Protocol. Ends of lines that came with the request before are no request either.

        h11 has no way to skip them, so a new h11 connection goes on with what follows them.
        """
        if self.conn.their_state is h11.IDLE:
            waiting, is_closed = self.conn.trailing_data
            if waiting[:1] in (b"\r", b"\n"):
                self.conn = h11.Connection(h11.SERVER)
                if rest := waiting.lstrip(b"\r\n"):
                    self.conn.receive_data(rest)
                if is_closed:
                    self.conn.receive_data(b"")
        super().handle_events()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        if self._next_look is not None:
            self._next_look.cancel()
        super().connection_lost(exc)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._num_unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; uvicorn fails where an answer has begun already."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing in the log: clients in Java offer HTTP/2 with each request.

        Who offers another protocol may be answered in this one. uvicorn would warn, and advise to
        install a library for WebSockets, which no route here speaks.
        """

    def _await_request(self) -> None:
        """A deadline stands until the head is whole: a byte now and then does not move it."""
        if self._deadline is None:
            self._deadline = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _look_at_reader(self) -> None:
        """Give up a client that has read nothing since the last look, while an answer waited."""
        num_unread = None
        if self.flow.write_paused or self.transport.is_closing():
            num_unread = self.transport.get_write_buffer_size()
            if self._num_unread is not None and num_unread >= self._num_unread:
                self.transport.abort()
                return
        self._num_unread = num_unread
        self._next_look = self.loop.call_later(self.timeout_keep_alive, self._look_at_reader)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _plain(address: str) -> str:
    """An address of IPv4 as proxies are named by it, and not as ::ffff:127.0.0.1.

    A socket that takes connections of IPv4 and IPv6 (--host ::) tells of it so.
    """
    with suppress(ValueError):
        mapped = getattr(ipaddress.ip_address(address), "ipv4_mapped", None)
        return address if mapped is None else str(mapped)
    return address
