"""`blockdraft doctor`: the silent mismatches behind low acceptance, line by line."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from blockdraft.cli import options
from blockdraft.cli.output import print_json
from blockdraft.cli.stages import stage_progress
from blockdraft.core.config import Thinking
from blockdraft.core.errors import NO
from blockdraft.core.out_of_memory import full_memory_refused
from blockdraft.diagnose.doctor.check import SIGNS, Mark, verdict
from blockdraft.hub.catalog import display_name

if TYPE_CHECKING:
    from blockdraft.diagnose.doctor.examine import Examination


_COLORS: Mapping[Mark, str] = {
    "ok": "green",
    "warning": "yellow",
    "out": "bold red",
    "unknown": "dim",
}


@options.models(without=(*options.FIXED, "lookup"))
def doctor(
    ctx: typer.Context,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Only read the models' files; load no weights and decode nothing."
        ),
    ] = False,
    thinking: Annotated[
        Thinking,
        typer.Option(
            help="Whether your requests have thinking on or off; template: the chat template's "
            "default."
        ),
    ] = "template",
    as_json: options.Json = False,
) -> None:
    """Look for mistakes in models, chat template and machine that cost speed without an error.

    Exits with 0 if nothing is wrong, and with 1 if something is.
    """
    config = options.llm_config(ctx.params)
    # They load torch: not for --help, nor for a mistyped option.
    from blockdraft.diagnose.doctor.examine import examine
    from blockdraft.diagnose.doctor.pair import read_pair

    pair = read_pair(config, thinking)
    memory = full_memory_refused("free some on the device, or take another --device")
    with memory, stage_progress() as on_stage:
        found = examine(pair, on_stage, quick=quick)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(found)
    if not found.in_order:
        raise typer.Exit(NO)


def _print(found: "Examination") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    drafter = display_name(str(found.pair.drafter_folder))
    print(f"{display_name(found.pair.config.target)} drafted by {drafter}")
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for check in found.checks:
        cell = Text(check.found)
        if check.remedy:
            cell.append(f"\n→ {check.remedy}", style="bold" if check.mark == "out" else "")
        mark = Text(f"{SIGNS[check.mark]} {check.mark}", style=_COLORS[check.mark])
        table.add_row(mark, Text(check.name), cell)
    console.print(table)
    print(verdict(found.checks))
    print(f"{found.seconds:.0f} s")
