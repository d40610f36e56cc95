"""What the command line does to the logs of a process must not outlive a command in a test."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_NAMES = ("blockdraft", "uvicorn", "asyncio")


@contextmanager
def own_log() -> Iterator[None]:
    """Undo it: the stream that they are given is closed when a command ends, or its test."""
    loggers = [logging.getLogger(name) for name in _NAMES]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, was in zip(loggers, before, strict=True):
        logger.handlers, logger.level, logger.propagate = was
