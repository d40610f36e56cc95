"""A server process: serves a loaded pair, and drains."""

import asyncio
import logging
import socket
import time
from contextlib import suppress
from importlib.metadata import version
from types import FrameType

import uvicorn

from blockdraft.core.errors import EngineDead
from blockdraft.core.words import counted
from blockdraft.engine.async_engine import AsyncEngine
from blockdraft.llm import LLM
from blockdraft.measure.identity import describe_setup
from blockdraft.server.address import BACKLOG, is_loopback, url_of
from blockdraft.server.app import create_app
from blockdraft.server.config import ServeConfig
from blockdraft.server.connection import Connection
from blockdraft.server.guard import Traffic
from blockdraft.server.metrics import Metrics
from blockdraft.server.service import ServedModel, Service, fingerprint

_CLOSING_SECONDS = 3
"""Connections get so long to take what was sent, when everything else has ended."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than proxies keep an idle connection (nginx and most others: 60), else they would now and
then send a request into one that is being closed, and answer 502."""

logger = logging.getLogger(__name__)


def serve(llm: LLM, config: ServeConfig, sock: socket.socket) -> bool:
    """Serve a loaded pair until SIGTERM or SIGINT; True if every request was answered.

    The first signal lets running requests end, for `drain_seconds` at most, and refuses new ones;
    a second one ends the server at once.

    Raises:
        EngineDead: the engine has ended by a failure, and the server with it.
    """
    service = make_service(llm, config)
    traffic = Traffic()
    server = DrainingServer(service, traffic, config.drain_seconds)
    service.engine.start()
    try:
        host, port = sock.getsockname()[:2]
        if not config.api_keys and not is_loopback(host):
            logger.warning(
                "no API key is set: everybody who can reach %s may use the model; give "
                "--api-key-file, or listen on 127.0.0.1",
                url_of(host, port),
            )
        logger.info("serving %s on %s", service.model.name, url_of(host, port))
        server.run(sockets=[sock])
    finally:
        service.engine.stop()
    if server.death is not None:
        raise EngineDead(server.death)
    return server.has_answered_all


def make_service(llm: LLM, config: ServeConfig) -> Service:
    """Everything behind the HTTP routes; its engine is not started."""
    name = config.model_name or llm.config.target
    drafter = None if llm.drafter_folder is None else str(llm.drafter_folder)
    model = ServedModel(
        name=name,
        root=llm.config.target,
        fingerprint=_fingerprint(llm, drafter),
        max_draft_depth=llm.engine.max_draft_depth,
        created=int(time.time()),
    )
    metrics = Metrics(name, model.max_draft_depth)
    engine = AsyncEngine(llm.samples, max_waiting=config.max_waiting, observer=metrics)
    metrics.watch(engine.load)
    return Service(engine, llm.tokenizer, model, config, metrics, lambda: llm.environment)


def _fingerprint(llm: LLM, drafter: str | None) -> str:
    # The drafter changes the text only where exactness was given up.
    changing = None if llm.config.exact else drafter
    settings = (llm.config.target, describe_setup(llm), changing)
    return fingerprint(version("blockdraft"), *settings)


class DrainingServer(uvicorn.Server):
    """Goes on listening while it drains, so that /health can say so; ends with its engine."""

    def __init__(self, service: Service, traffic: Traffic, drain_seconds: float) -> None:
        self._service = service
        self._traffic = traffic
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.has_answered_all = True
        self.death: str | None = None
        """Why the engine has ended, if a failure ended it."""
        super().__init__(
            uvicorn.Config(
                create_app(service, traffic),
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                http=Connection,
                ws="none",
                # Anybody may write these headers, so only those of known proxies count.
                proxy_headers=bool(service.config.trusted_proxies),
                forwarded_allow_ips=list(service.config.trusted_proxies),
                backlog=1,  # see startup
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server."""
        self._loop = asyncio.get_running_loop()
        self._service.engine.on_death = self._hear_of_death
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn.Server.

        asyncio takes so many connections at once as may wait, and goes on when the process has no
        file left: it would log each try, thousands a second, and hold up all requests. Taken one by
        one, it tries again after a second. Still as many may wait as before.
        """
        await super().startup(sockets)
        for sock in sockets or []:
            sock.listen(BACKLOG)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second; in place of uvicorn's own way.

        May be called between any two instructions of the event loop's thread.
        """
        if self._loop is None or self._traffic.is_draining:
            self.has_answered_all = self.has_answered_all and not self._traffic.num_active
            self.should_exit = self.force_exit = True
            return
        self._traffic.is_draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _hear_of_death(self, death: str) -> None:
        """Called in the engine's thread."""
        self.death = death
        assert self._loop is not None
        with suppress(RuntimeError):  # the event loop has ended, and so does the process
            self._loop.call_soon_threadsafe(self._end_with_engine)

    def _end_with_engine(self) -> None:
        """Let open requests get their errors; only a new process can answer again."""
        failing = counted(self._traffic.num_active, "request")
        logger.error("the server stops with its engine, without answers to %s", failing)
        if not self._traffic.is_draining:
            self._traffic.is_draining = True
            self._draining = asyncio.create_task(self._drain())

    def _start_draining(self) -> None:
        logger.info(
            "draining: %s may take %g s more; a second signal ends them immediately",
            counted(self._traffic.num_active, "request"),
            self._drain_seconds,
        )
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._drain_seconds):
                await self._traffic.wait_idle()
        except TimeoutError:
            self.has_answered_all = False
            logger.warning("%d requests did not finish in time", self._traffic.num_active)
            # Whoever still waits is told so, before the connections are closed.
            await asyncio.to_thread(self._service.engine.stop)
        self.should_exit = True
