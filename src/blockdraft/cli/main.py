"""`blockdraft`: the entry point. Importing it loads no model library, so `--help` is quick."""

import logging
import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blockdraft.cli import bench, models
from blockdraft.cli.chat import chat
from blockdraft.cli.data import data
from blockdraft.cli.generate import generate
from blockdraft.cli.train import train
from blockdraft.core.errors import BlockdraftError

USER_ERROR = 2
"""Exit status after a user's mistake."""


class _Commands(TyperGroup):
    """Shows what a user can mend as one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BlockdraftError as error:
            typer.echo(f"blockdraft: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(USER_ERROR) from error


app = typer.Typer(
    cls=_Commands,
    help="Exact block-diffusion speculative decoding of large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
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
