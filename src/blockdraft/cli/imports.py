"""Importing the model libraries: seconds, in which nothing is computed yet."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from blockdraft.core.errors import INTERRUPTED
from blockdraft.core.threads import watch_cores

_STDERR = 2


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import without garbage collection, and look meanwhile which cores are free.

    Ctrl-C ends the process at once: some libraries swallow the exception, or turn it into another.
    """
    watch_cores()
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, _end) if is_main else None
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.freeze()  # modules stay; collections need not look at them again
        if is_main:
            signal.signal(signal.SIGINT, before)


def _end(*_: object) -> NoReturn:
    with suppress(OSError):
        os.write(_STDERR, b"blockdraft: interrupted\n")  # sys.stderr may be in use just now
    os._exit(INTERRUPTED)
