"""How far long work is: one line that changes on a terminal, a line now and then elsewhere."""

import logging
import math
import sys
from time import monotonic
from typing import TextIO

SECONDS_ON_A_TERMINAL = 0.2
SECONDS_IN_A_FILE = 30.0


class Progress:
    """Shows the latest of many short texts on standard error.

    Nothing is shown while `logger` would say nothing. `clear` comes before anything else is said.
    """

    def __init__(self, logger: logging.Logger, stream: TextIO | None = None) -> None:
        self._logger = logger
        self._stream = stream or sys.stderr
        self._on_terminal = self._stream.isatty()
        self._is_shown = False
        self._shown_at = -math.inf if self._on_terminal else monotonic()

    def show(self, text: str) -> None:
        """Replace what stands there, unless that is too new."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        now = monotonic()
        pause = SECONDS_ON_A_TERMINAL if self._on_terminal else SECONDS_IN_A_FILE
        if now - self._shown_at < pause:
            return
        self._shown_at = now
        if not self._on_terminal:
            self._logger.info(text)
            return
        self._stream.write(f"\r\033[K{text}")
        self._stream.flush()
        self._is_shown = True

    def clear(self) -> None:
        """Take the line away."""
        if self._is_shown:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._is_shown = False


def time_left(seconds: float) -> str:
    """Such as "12 min left"."""
    if not math.isfinite(seconds):
        return "time left unknown"
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return (
        f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02} min left"
    )
