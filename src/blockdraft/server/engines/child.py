"""Another engine as a process of ours: wait until it serves, pass signals on, report its end."""

import http.client
import logging
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from blockdraft.core.libraries import environment_for_others
from blockdraft.core.signals import handled, log_in_handler
from blockdraft.server.address import url_of
from blockdraft.server.engines.engine import Command

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PAUSE = 0.5
"""Seconds between two questions whether it serves."""
_REPORT_EVERY = 10.0
_HEALTH_SECONDS = 5.0
_STDERR = 2
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Where to ask a server that listens on all addresses."""

logger = logging.getLogger(__name__)


def run_engine(name: str, command: Command, host: str, port: int) -> int:
    """Run an engine until it ends by itself or by a signal; its exit status, 128 + N for signal N.

    The first SIGTERM, SIGINT or SIGHUP is passed on, a second one ends the engine and all that it
    started at once. What it prints goes to standard error.
    """
    with_secrets = "".join(f"{variable}=... " for variable in command.environment)
    logger.info("running %s%s", with_secrets, shlex.join(command.arguments))
    child = _Child(command)
    with child.running() as process:
        is_ready = _wait_until_ready(name, process, host, port)
        # Not without an end: of a signal just before that wait Python would not take notice.
        while (status := process.poll()) is None:
            _wait_a_moment(process)
    status = 128 - status if status < 0 else status
    when = "" if is_ready else " before it was ready"
    logger.info("%s ended with exit status %d%s", name, status, when)
    return status


class _Child:
    """A process in a group of its own: a terminal's Ctrl-C reaches it through us only, once."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []
        self._was_told = False

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Start it and pass signals on; at the end nothing that it started stays behind."""
        try:
            with handled(self._receive, *_FORWARDED):
                self._process = subprocess.Popen(
                    self._command.arguments,
                    env={**environment_for_others(), **self._command.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,
                    process_group=0,
                )
                self._pass_on()
                yield self._process
        finally:
            if self._process is not None:
                self._end_group(self._process)
                self._process.wait()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._pending.append(number)
        self._pass_on()

    def _pass_on(self) -> None:
        """Deliver what has come; a signal may come before the process is there."""
        while self._process is not None and self._pending:
            number = self._pending.pop(0)
            if self._was_told:
                self._end_group(self._process)
                continue
            self._was_told = True
            self._process.send_signal(number)
            name = signal.Signals(number).name
            log_in_handler(logger, "forwarded %s; a second signal ends it immediately", name)

    @staticmethod
    def _end_group(process: subprocess.Popen[bytes]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(name: str, process: subprocess.Popen[Any], host: str, port: int) -> bool:
    """Ask until it serves, telling that we wait; False if it ended before."""
    start = reported = time.monotonic()
    url = url_of(host, port)
    while process.poll() is None:
        if _is_healthy(host, port):
            waited = time.monotonic() - start
            logger.info("%s serves on %s, ready after %.0f s", name, url, waited)
            return True
        if time.monotonic() - reported >= _REPORT_EVERY:
            reported = time.monotonic()
            logger.info("waiting for %s on %s, %.0f s so far", name, url, reported - start)
        _wait_a_moment(process)
    return False


def _wait_a_moment(process: subprocess.Popen[Any]) -> None:
    with suppress(subprocess.TimeoutExpired):
        process.wait(_PAUSE)


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(
        _ANYWHERE.get(host, host), port, timeout=_HEALTH_SECONDS
    )
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
