"""What a command says on standard error: our log, and the options -v and -q of every command."""

import inspect
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from blockdraft.core.errors import ConfigError

LOG = logging.getLogger("blockdraft")

_PLAIN = "blockdraft: %(message)s"
_VERBOSE = "blockdraft: %(asctime)s %(levelname)s %(name)s: %(message)s"

_DATED = "blockdraft: %(asctime)s %(levelname)s %(message)s"

_SERVER_LOGGERS = ("uvicorn", "asyncio")
"""Of libraries, whose warnings would be written as they are, without time and level."""

_VERBOSITY = {
    "verbose": Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Log more, with times, and show tracebacks of errors."
        ),
    ],
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Log errors only.")],
}


def start_log() -> None:
    """Send our own log, such as the notice of a first download, to standard error."""
    LOG.handlers = [logging.StreamHandler(sys.stderr)]
    LOG.propagate = False
    _set_level(verbose=False, quiet=False)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger and message; of a request, its parts too."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "parts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_as_server(log_format: str) -> None:
    """Give every line its time and level, as a server's log needs them."""
    (handler,) = LOG.handlers
    formatter = JsonFormatter() if log_format == "json" else logging.Formatter(_DATED)
    if log_format == "json" or not LOG.isEnabledFor(logging.DEBUG):
        handler.setFormatter(formatter)  # -v writes time and level already
    for name in _SERVER_LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(max(logging.WARNING, LOG.level))


def tell_why_it_ends(message: str) -> None:
    """Write the last line of a command that fails; where the log is JSON, as a part of it.

    If it cannot be written, as nobody reads it any more, the exit status still says as much.
    """
    if any(isinstance(handler.formatter, JsonFormatter) for handler in LOG.handlers):
        LOG.error(message)
    else:
        with suppress(OSError):  # typer would make an exit with 1 of it, which means "no"
            typer.echo(f"blockdraft: {message}", err=True)


def with_verbosity(command: Callable[..., None]) -> Callable[..., None]:
    """The same command with the options -v and -q."""

    @wraps(command)
    def run(*arguments: Any, verbose: bool, quiet: bool, **values: Any) -> None:
        _set_level(verbose=verbose, quiet=quiet)
        command(*arguments, **values)

    # typer reads the options from here.
    signature = inspect.signature(command)
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in _VERBOSITY.items()
    ]
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *added]
    )
    run.__annotations__ = get_type_hints(command, include_extras=True) | _VERBOSITY
    return run


def is_about_logging(option: str) -> bool:
    """Whether an option of a command says nothing of what it does."""
    return option in _VERBOSITY


def _set_level(*, verbose: bool, quiet: bool) -> None:
    if verbose and quiet:
        raise ConfigError("--verbose and --quiet contradict each other; leave one out")
    LOG.setLevel(logging.DEBUG if verbose else logging.ERROR if quiet else logging.INFO)
    LOG.handlers[0].setFormatter(logging.Formatter(_VERBOSE if verbose else _PLAIN))
