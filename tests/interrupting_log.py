"""Standard error in the middle of being written to when a signal comes."""

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr


class _Interrupting(io.RawIOBase):
    def __init__(self, number: int, marker: str) -> None:
        self.text = ""
        self._number = number
        self._marker = marker

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        new = bytes(data).decode()
        self.text += new
        if self._marker in new:
            os.kill(os.getpid(), self._number)  # its handler runs before this returns
        return len(data)


@contextmanager
def interrupting_log(logger: logging.Logger, number: int, marker: str) -> Iterator[_Interrupting]:
    """Standard error, to which `logger` writes; while a text with `marker` is, the signal comes."""
    raw = _Interrupting(number, marker)
    stream = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    handler, level = logging.StreamHandler(stream), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with redirect_stderr(stream):
            yield raw
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
