"""What to say when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

from blockdraft.core.errors import ConfigError
from blockdraft.engine.out_of_memory import is_out_of_memory


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
