"""`blockdraft`: the entry point. Importing it loads no model library, so `--help` is quick."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from blockdraft.cli import bench, models
from blockdraft.cli.chat import chat
from blockdraft.cli.data import data
from blockdraft.cli.doctor import doctor
from blockdraft.cli.explain import explain
from blockdraft.cli.generate import generate
from blockdraft.cli.prove import prove
from blockdraft.cli.serve import serve
from blockdraft.cli.train import train
from blockdraft.core.errors import BlockdraftError

USER_ERROR = 2
"""Exit status after a user's mistake."""


# Newer versions of typer bring their own copy of click, older ones use the package.
_UsageError: Any = typer.BadParameter.__mro__[1]


@contextmanager
def _refusals() -> Iterator[None]:
    """Shows what a user can mend as one line instead of a traceback or a box."""
    try:
        yield
    except BlockdraftError as error:
        _refuse(str(error), error)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # not a mistake: the help is what was asked for
        _refuse(_usage_message(error), error)


def _refuse(message: str, cause: Exception) -> NoReturn:
    typer.echo(f"blockdraft: {' '.join(message.split())}", err=True)
    raise typer.Exit(USER_ERROR) from cause


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "blockdraft"
    # click answers some mistakes with a hint of its own, "Did you mean ...?".
    message = error.format_message().strip().rstrip(".").replace(": Value error, ", ": ")
    # Newer versions have values checked by pydantic, which leaves them out of its message.
    checks = getattr(error.__cause__, "errors", None)
    value = repr(checks()[0].get("input")) if callable(checks) else ""
    if value not in message:
        message += f", not {value}"
    return f"{message[:1].lower()}{message[1:]}; see `{command} --help`"


class _Commands(TyperGroup):
    """Refuses on one line, whether the options are wrong or what they name."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        with _refusals():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with _refusals():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    help="Exact block-diffusion speculative decoding of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(prove)
app.command()(explain)
app.command()(doctor)
app.command()(serve)
app.command()(data)
app.command()(train)
app.add_typer(bench.app, name="bench")
app.add_typer(models.app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blockdraft {version('blockdraft')}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Send our own log, such as the notice of a first download, to standard error."""
    logger = logging.getLogger("blockdraft")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("blockdraft: %(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def main() -> None:
    """Run the command line."""
    app(prog_name="blockdraft")


if __name__ == "__main__":
    main()
