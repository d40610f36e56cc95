"""Importing the model libraries: seconds, in which nothing is computed yet."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from blockdraft.core.errors import INTERRUPTED
from blockdraft.core.signals import handled
from blockdraft.core.threads import watch_cores

_STDERR = 2


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and look meanwhile which cores are free."""
    watch_cores()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with ended_by_interrupt():
            yield
    finally:
        if was_enabled:
            gc.enable()
            gc.freeze()  # modules stay; collections need not look at them again
            atexit.register(_end_quietly)


def _end_quietly() -> None:
    # Triton's bindings print a page about what the frozen modules leave of them. To unfreeze these
    # and collect them at the end would take over a second.
    if "triton" in sys.modules:
        sys.stderr.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process at once, with one line, while something is imported.

    Some libraries swallow the exception, or turn it into another.
    """
    with handled(_end, signal.SIGINT):
        yield


def _end(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(_STDERR, b"blockdraft: interrupted\n")  # sys.stderr may be in use just now
    os._exit(INTERRUPTED)
