"""What commands read from standard input."""

import sys
from collections.abc import Callable

from blockdraft.core.errors import RequestError


def read_prompt(prompt: str) -> str:
    """The text of a prompt; - reads it from standard input.

    Raises:
        RequestError: it is empty, or standard input is closed or no text.
    """
    text = read_stdin(lambda: sys.stdin.read()) if prompt == "-" else prompt
    if not text.strip():
        raise RequestError("the prompt is empty; give some text")
    return text


def read_stdin(read: Callable[[], str]) -> str:
    """What `read` takes from standard input.

    Raises:
        RequestError: it is closed, or no text.
    """
    if sys.stdin is None:  # closed by the shell, as with <&-
        raise RequestError("standard input is closed; redirect it from something")
    try:
        return read()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input holds bytes that are not {error.encoding.upper()} ({error.reason}); "
            f"give text in {error.encoding.upper()}"
        ) from error
