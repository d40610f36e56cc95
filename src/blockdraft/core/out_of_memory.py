"""Telling a lack of memory from other failures, and what to say of it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from blockdraft.core.errors import ConfigError

_MESSAGES = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
"""In lower case, what torch, the system and CUDA's libraries say in errors of other types."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if less work at once, or more memory, could have succeeded."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    message = str(error).lower()
    is_known = isinstance(error, RuntimeError) and any(words in message for words in _MESSAGES)
    return is_known or isinstance(error, MemoryError)


@contextmanager
def full_memory_refused(remedy: str) -> Iterator[None]:
    """Name the settings that take memory, in place of the error of whoever wanted it.

    remedy: what to lower.

    Raises:
        ConfigError: memory ran out inside.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).split("\n")[0].rstrip(".") or type(error).__name__
        raise ConfigError(f"memory ran out ({reason}); {remedy}") from error
