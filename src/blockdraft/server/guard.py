"""What every request passes first: names, key, size, draining; and what is noted. No torch."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Callable
from time import perf_counter
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from blockdraft.server.address import Names
from blockdraft.server.config import ServeConfig
from blockdraft.server.errors import ApiError, as_api_error, draining
from blockdraft.server.responses import ClientGone

BODY_SECONDS = 30.0
"""A body must arrive in this time."""
_MOST_DISCARDED = 2**26
"""Bytes of a body that is too large which are read all the same, so that its sender listens."""
_HEALTH_PATHS = frozenset({"/health", "/ready"})
_WATCHED_PATHS = _HEALTH_PATHS | {"/metrics"}
"""Asked every few seconds, by monitors and by the web page."""
_PATHS_WHILE_DRAINING = _WATCHED_PATHS | {"/version"}

logger = logging.getLogger(__name__)


class Traffic:
    """How many requests are being answered, and whether new ones are taken."""

    def __init__(self) -> None:
        self.is_draining = False
        self.num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request begins."""
        self.num_active += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request has ended."""
        self.num_active -= 1
        if not self.num_active:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until nothing is being answered."""
        await self._idle.wait()


class Guard:
    """ASGI middleware around the whole app.

    Args:
        open_paths: need no key; those that tell of health need none either.
        count_refused: is told the status of every answer from 400 on.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        config: ServeConfig,
        traffic: Traffic,
        open_paths: frozenset[str],
        count_refused: Callable[[int], None],
    ) -> None:
        self._app = app
        self._traffic = traffic
        self._names = Names(config)
        self._max_body = config.max_body
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._open_paths = _HEALTH_PATHS | open_paths
        self._count_refused = count_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, reply = perf_counter(), _Reply(send)
        self._traffic.enter()
        try:
            await self._answer(scope, receive, reply)
        except ClientGone:
            reply.status = 499  # as nginx logs it; nothing is sent
        except asyncio.CancelledError:
            # At the second signal the event loop ends with its requests.
            if not self._traffic.is_draining:
                raise
            if not reply.has_begun:
                await draining().response(scope["path"])(scope, receive, reply)
        # A request that fails, however, is answered, and the server goes on.
        except Exception as error:
            # What is wrong with a request has been answered by the app's own handlers.
            if not isinstance(error, ApiError):
                logger.exception("%s failed", _line(scope))
            if not reply.has_begun:
                await as_api_error(error).response(scope["path"])(scope, receive, reply)
        finally:
            self._traffic.leave()
            if reply.has_begun and reply.status >= 400:
                self._count_refused(reply.status)
            _log(scope, reply.status, perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        _check_length(scope)
        if self._names.are_checked:
            self._check_names(scope)
        if self._traffic.is_draining and path not in _PATHS_WHILE_DRAINING:
            raise draining()
        client = _address(scope)
        if self._keys and path not in self._open_paths:
            client = f"key {self._check_key(scope)}"
        scope.setdefault("state", {})["client"] = client
        if scope["method"] in ("POST", "PUT", "PATCH"):
            receive = _replay(await self._read_body(scope, receive), receive)
        if scope["method"] == "HEAD":
            # Monitors ask for the status alone; uvicorn leaves out the body.
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)

    def _check_names(self, scope: Scope) -> None:
        """Refuse what a browser asks on behalf of a page that is not ours; see Names."""
        host = _header(scope, b"host").decode("latin-1")
        # No browser leaves it out.
        if host and not self._names.allow_host(host):
            raise ApiError(
                421,
                f"the request is for the host {host!r:.80}, but this server is not known by that "
                "name; use 127.0.0.1, or start it with --allowed-host NAME",
                code="unknown_host",
            )
        for origin in _values(scope, b"origin"):
            if not origin or self._names.allow_origin(origin, host):
                continue
            raise ApiError(
                403,
                f"the request comes from a page of {origin!r:.80}, which may not call this server; "
                "start it with --cors-origin ORIGIN to allow its pages, or with --allowed-host "
                "NAME if the page is the server's own",
                code="foreign_origin",
            )

    def _check_key(self, scope: Scope) -> int:
        """The place of the key that was given among those of the server."""
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        # The first header may be meant for a proxy in front (Basic), or for another service:
        # Anthropic's clients send both if their environment has a token.
        given = [token] if scheme.lower() == b"bearer" else []
        given.append(_header(scope, b"x-api-key"))
        digests = [_digest(key.strip()) for key in given]
        # All of them are compared, in constant time: the time tells nothing about any key.
        found = [
            index
            for digest in digests
            for index, own in enumerate(self._keys)
            if hmac.compare_digest(digest, own)
        ]
        if not found:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as "
                "x-api-key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return found[0]

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        declared = _header(scope, b"content-length")
        is_too_large = declared.isdigit() and int(declared) > self._max_body
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    is_too_large = is_too_large or size > self._max_body
                    if not is_too_large:
                        body += piece
                    if not message.get("more_body") or size > _MOST_DISCARDED:
                        break
        except TimeoutError as error:
            raise ApiError(
                408, f"the body did not arrive in {BODY_SECONDS:g} seconds", code="slow_body"
            ) from error
        if is_too_large:
            raise ApiError(
                413,
                f"the body has more than {self._max_body} bytes; send less",
                code="body_too_large",
                headers={"connection": "close"},
            )
        return bytes(body)


def _check_length(scope: Scope) -> None:
    """Refuse a body with two lengths.

    A proxy that goes by the other one would take a part of the body for the next request, of
    somebody else maybe, so nothing more is read from the connection (RFC 9112, 6.3).
    """
    if _header(scope, b"content-length") and _header(scope, b"transfer-encoding"):
        raise ApiError(
            400,
            "the request has both Content-Length and Transfer-Encoding; send one of them",
            param="content-length",
            code="invalid_value",
            headers={"connection": "close"},
        )


class _Reply:
    """Sends on, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False
        self.status = 500

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
        await self._send(message)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the body in one piece, then whatever comes."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _line(scope: Scope) -> str:
    """What was asked, without characters that would begin a line of the log or move its cursor."""
    return f"{scope['state']['request_id']} {scope['method']} {quote(scope['path'])}"


def _log(scope: Scope, status: int, seconds: float) -> None:
    """One line, with its parts for a log of JSON; none of who only watches and gets an answer."""
    client = scope["state"].get("client") or _address(scope)
    parts = {
        "request_id": scope["state"]["request_id"],
        "client": client,
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "seconds": round(seconds, 3),
    }
    is_watching = scope["path"] in _WATCHED_PATHS and status < 400
    level = logging.DEBUG if is_watching else logging.INFO
    line = _line(scope)
    logger.log(level, "%s %d %.3f s %s", line, status, seconds, client, extra={"parts": parts})


def _address(scope: Scope) -> str:
    """Of the client, as a trusted proxy tells it, which may pass on what the client has written."""
    try:
        return str(ipaddress.ip_address((scope.get("client") or ("",))[0]))
    except ValueError:
        return "unknown"


def _header(scope: Scope, name: bytes) -> bytes:
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if values else b""


def _values(scope: Scope, name: bytes) -> list[str]:
    """Of a header that may come several times."""
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
