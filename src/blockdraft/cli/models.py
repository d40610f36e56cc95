"""`blockdraft models`: what is known by name, where it lies, and whether two models fit."""

from typing import Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.command import Command
from blockdraft.cli.fit_output import fit_lines
from blockdraft.cli.logs import with_verbosity
from blockdraft.cli.output import print_json
from blockdraft.core.errors import MISTAKE, NO, ConfigError
from blockdraft.hub.catalog import CATALOG
from blockdraft.hub.resolve import resolve_config, resolve_model

Name = Annotated[
    str,
    typer.Argument(
        help="A name that `blockdraft models` lists, a folder, a GGUF file, or a Hugging Face id."
    ),
]

_ABOUT_AND_LINES = 40
"""Columns for what a model is about, and for the lines of the table."""

app = typer.Typer(
    help="List known models, fetch one, or check whether two fit. Without a command: list."
)


@app.callback(invoke_without_command=True)
def default(ctx: typer.Context, as_json: options.Json = False) -> None:
    """List the models unless a command is given."""
    if ctx.invoked_subcommand is None:
        _print_models(as_json=as_json)
    elif as_json:
        raise ConfigError(
            f"--json stands before {ctx.invoked_subcommand}, which then prints text; give it at "
            "the end"
        )


@app.command("list", cls=Command)
@with_verbosity
def list_models(as_json: options.Json = False) -> None:
    """List the models that are known by name."""
    _print_models(as_json=as_json)


def _print_models(*, as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {"name": e.name, "role": e.role, "drafter": e.drafter, "about": e.about}
                for e in CATALOG.values()
            ]
        )
        return
    from rich.console import Console
    from rich.table import Column, Table

    rows = [(e.name, e.drafter, e.about) for e in CATALOG.values() if e.drafter is not None]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    console = Console()
    # A name that a table cuts cannot be given to another command.
    if not console.is_terminal or console.width < sum(widths) + _ABOUT_AND_LINES:
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            print("  ".join([*cells, row[-1]]))
        return
    table = Table(*(Column(name, no_wrap=True) for name in ("target", "drafter")), "about target")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command(cls=Command)
@with_verbosity
def path(name: Name, as_json: options.Json = False) -> None:
    """Print the folder of a model, and download it first if needed."""
    folder = str(resolve_model(name))
    if as_json:
        print_json({"path": folder})
    else:
        print(folder)


@app.command(cls=Command)
@with_verbosity
def check(
    target: Name,
    drafter: Name,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Say whether a drafter fits a target, and how the pair would run, without reading weights.

    Exit status 0: it fits; 1: it does not; 2: one of the two cannot be run here. The reason is on
    one line.
    """
    from blockdraft.diagnose.fit import examine_fit
    from blockdraft.models.target.loading import resolve_device, resolve_dtype

    dtype = resolve_dtype("auto", resolve_device("auto"))
    fit = examine_fit(
        resolve_config(target), resolve_config(drafter), dtype, trust_remote_code=trust_remote_code
    )
    if as_json:
        print_json(fit.to_dict())
    else:
        for line in fit_lines(fit, target, drafter):
            print(line)
    if not fit.fits:
        raise typer.Exit(NO)
    if fit.target.missing is not None:
        raise typer.Exit(MISTAKE)
