"""`blockdraft`: the entry point. Importing it loads no model library, so `--help` is quick."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from blockdraft.cli import bench, models
from blockdraft.cli.chat import chat
from blockdraft.cli.command import Command
from blockdraft.cli.count_ngrams import count_ngrams
from blockdraft.cli.data import data
from blockdraft.cli.doctor import doctor
from blockdraft.cli.env import env
from blockdraft.cli.explain import explain
from blockdraft.cli.generate import generate
from blockdraft.cli.logs import LOG, start_log, tell_why_it_ends, with_verbosity
from blockdraft.cli.output import prints_unicode
from blockdraft.cli.prove import prove
from blockdraft.cli.serve import serve
from blockdraft.cli.train import train
from blockdraft.cli.train_head import train_head
from blockdraft.cli.verify import verify
from blockdraft.core.errors import FAILED, INTERRUPTED, MISTAKE, BlockdraftError, exit_status

EXIT_STATUSES = (
    "Exit status: 0 success, or yes; 1 no (outputs differ, a check failed); 2 a mistake in the "
    "command, the configuration, or a file or model it names; 3 the network failed; 4 the disk "
    "failed, or is full; 5 blockdraft failed; 6 cannot tell; 130 interrupted, 143 SIGTERM."
)


# Newer versions of typer bring their own copy of click, older ones use the package.
_UsageError: Any = typer.BadParameter.__mro__[1]


@contextmanager
def _refusals() -> Iterator[None]:
    """Shows what a user can mend as one line instead of a traceback or a box."""
    try:
        yield
    except BlockdraftError as error:
        _refuse(str(error), error, exit_status(error))
    except BrokenPipeError as error:
        # Whoever read our output has left; Python would write the rest of it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(exit_status(error)) from error
    except SystemExit as error:
        # rich, which prints tables and help, makes an exit with 1 of it, which would mean "no".
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        raise typer.Exit(exit_status(error.__context__)) from error
    except OSError as error:
        _refuse(f"{error}; --verbose shows where", error, exit_status(error))
    except KeyboardInterrupt as error:
        _refuse("interrupted", error, exit_status(error))
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # not a mistake: the help is what was asked for
        _refuse(_usage_message(error), error, MISTAKE)


def _refuse(message: str, cause: BaseException, status: int) -> NoReturn:
    LOG.debug("the error was raised here", exc_info=cause)
    tell_why_it_ends(" ".join(message.split()))
    raise typer.Exit(status) from cause


def _usage_message(error: Any) -> str:
    command = error.ctx.command_path if error.ctx else "blockdraft"
    # click answers some mistakes with a hint of its own, "Did you mean ...?".
    message = error.format_message().strip().rstrip(".").replace(": Value error, ", ": ")
    # Newer versions have values checked by pydantic, which leaves them out of its message.
    checks = getattr(error.__cause__, "errors", None)
    value = repr(checks()[0].get("input")) if callable(checks) else ""
    if value not in message:
        message += f", not {value}"
    if "unexpected extra argument" in message and error.ctx and "prompt" in error.ctx.params:
        message += "; put a prompt of several words in quotes"
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
    help="Lossless speculative decoding of large language models, with block-diffusion drafters.",
    epilog=EXIT_STATUSES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    *(generate, chat, prove, verify, explain, doctor, serve),
    *(data, train, train_head, count_ngrams, env),
):
    app.command(cls=Command)(with_verbosity(command))
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
    """Start the log before any command."""
    start_log()


def _print_what_can_be_printed() -> None:
    """A letter that an older locale's encoding lacks becomes a question mark, and no error."""
    if isinstance(sys.stdout, TextIOWrapper) and not prints_unicode(sys.stdout):
        sys.stdout.reconfigure(errors="replace")


def main() -> None:
    """Run the command line."""
    _print_what_can_be_printed()
    try:
        app(prog_name="blockdraft")
    except Exception as error:
        # -v shows it; a library may have set up the log of another process.
        LOG.debug("the error was raised here", exc_info=error)
        what = " ".join(f"{type(error).__name__}: {error}".split())
        tell_why_it_ends(
            f"{what}; this is a bug in blockdraft: run the command again with -v, and report what "
            "it and `blockdraft env` print"
        )
        sys.exit(FAILED)
    except KeyboardInterrupt:  # between two commands' lines, where nothing else catches it
        tell_why_it_ends("interrupted")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
