"""`blockdraft models`: what is known by name, where it lies, and whether two models fit."""

from typing import Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.logs import with_verbosity
from blockdraft.cli.output import print_json
from blockdraft.core.errors import NO, ModelError
from blockdraft.hub.catalog import CATALOG
from blockdraft.hub.resolve import resolve_model

Name = Annotated[
    str,
    typer.Argument(help="A name that `blockdraft models` lists, a folder, or a Hugging Face id."),
]

app = typer.Typer(
    help="List known models, fetch one, or check whether two fit. Without a command: list."
)


@app.callback(invoke_without_command=True)
def default(ctx: typer.Context) -> None:
    """List the models unless a command is given."""
    if ctx.invoked_subcommand is None:
        _print_models(as_json=False)


@app.command("list")
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
    from rich.table import Table

    table = Table("name", "role", "drafter", "about")
    for entry in CATALOG.values():
        table.add_row(entry.name, entry.role, entry.drafter or "", entry.about)
    Console().print(table)


@app.command()
@with_verbosity
def path(name: Name, as_json: options.Json = False) -> None:
    """Print the folder of a model; it is downloaded first if need be."""
    folder = str(resolve_model(name))
    if as_json:
        print_json({"path": folder})
    else:
        print(folder)


@app.command()
@with_verbosity
def check(
    target: Name,
    drafter: Name,
    as_json: options.Json = False,
) -> None:
    """Say whether a drafter fits a target; exit status 1 and the reason if not."""
    from blockdraft.models.checkpoint import read_config
    from blockdraft.models.draft_config import DraftConfig
    from blockdraft.models.loading import check_pair, target_without_weights

    config = DraftConfig.from_dict(read_config(resolve_model(drafter)))
    model = target_without_weights(resolve_model(target))
    try:
        check_pair(model, config)
    except ModelError as error:
        if as_json:
            print_json({"fits": False, "reason": str(error)})
        else:
            print(error)
        raise typer.Exit(NO) from error
    if as_json:
        print_json({"fits": True, "block_size": config.block_size})
    else:
        print(f"{drafter} fits {target}: blocks of {config.block_size} slots")
