"""Signals that ask for the end: as an exception, and what their handlers may say."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Signaled(KeyboardInterrupt):
    """A signal asked for the end; `number` is its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextmanager
def handled(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Within it these signals go to `handler`.

    Python takes signals in its main thread only: elsewhere they are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            # None is one that Python did not install, and cannot put back.
            signal.signal(number, signal.SIG_DFL if earlier is None else earlier)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Within it SIGTERM raises Signaled, as Ctrl-C raises KeyboardInterrupt; a second one kills."""
    with handled(_raise, signal.SIGTERM):
        yield


def _raise(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Signaled(number)


def log_in_handler(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a message from the handler of a signal.

    In a thread of its own. The signal may have come while this one was writing to the log, which
    cannot be done again in between: Python raises a RuntimeError, and what the handler has to do
    would be lost with it.
    """
    threading.Thread(target=logger.info, args=(message, *args)).start()
