"""Connections on which no request arrives are closed, or they would use up the process's files."""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """A connection of uvicorn's, which itself bounds only the rest between two requests.

    So long it may also take to bring one: from its opening, or from the first byte after a rest, to
    the end of the head. The body has a limit of its own (`guard.BODY_SECONDS`).
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif not self.transport.is_closing():
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._stop_waiting()
        super().connection_lost(exc)

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

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
