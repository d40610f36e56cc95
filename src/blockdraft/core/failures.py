"""Failures that may cost a request speed or a record, and never its answer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class FailureLog:
    """Counts the failures of one part, and logs the 1st, 2nd, 4th, 8th ... of them.

    A part that always fails is asked again in every step, and must not fill the log.

    Args:
        part: what fails, and what that costs; the message of the log.
    """

    def __init__(self, part: str, logger: logging.Logger) -> None:
        self.part = part
        self.num_failures = 0
        self._logger = logger

    def note(self, error: Exception) -> None:
        """Count one."""
        self.num_failures += 1
        if self.num_failures & (self.num_failures - 1) == 0:
            self._logger.error("%s (%d so far)", self.part, self.num_failures, exc_info=error)

    @contextmanager
    def caught(self) -> Iterator[None]:
        """An exception inside is counted and goes no further; an interrupt does."""
        try:
            yield
        except Exception as error:
            self.note(error)
