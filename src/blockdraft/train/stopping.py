"""Ctrl-C and SIGTERM: the step that runs is finished, and the state is saved."""

import logging
import signal
from contextlib import ExitStack
from types import FrameType

from blockdraft.core.signals import Signaled, handled, log_in_handler

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Signaled):
    """A run has ended because a signal asked for it; what it came to is saved."""


class StopSignals:
    """Within it, a first signal is only remembered; a second one interrupts at once.

    `signal`: the number of the one that came, 0 for none. Python takes signals in its main thread
    only: elsewhere they are left alone.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._handled = ExitStack()

    def __enter__(self) -> "StopSignals":
        self._handled.enter_context(handled(self._remember, *SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            raise Signaled(number)
        self.signal = number
        log_in_handler(
            logger, "the run ends after this step and is saved; a second signal ends it immediately"
        )
