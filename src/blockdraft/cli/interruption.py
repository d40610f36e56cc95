"""What a command that can go on says when Ctrl-C or SIGTERM breaks it off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from blockdraft.cli.logs import tell_why_it_ends
from blockdraft.core.errors import exit_status
from blockdraft.core.signals import sigterm_raises


@contextmanager
def says_how_to_go_on(line: Callable[[], str | None]) -> Iterator[None]:
    """End with `line` and the exit status of the signal; None says nothing."""
    try:
        with sigterm_raises():
            yield
    except KeyboardInterrupt as error:
        if message := line():
            tell_why_it_ends(message)
        raise typer.Exit(exit_status(error)) from error
