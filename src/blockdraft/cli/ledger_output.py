"""Ledgers on standard output, and as a picture in a file."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from blockdraft.cli.output import check_not_read, check_writable, write_report
from blockdraft.core.errors import ConfigError

if TYPE_CHECKING:
    from blockdraft.bench.ledger.accounts import Account

Ledger = Annotated[
    bool,
    typer.Option(
        "--ledger", help="Show where time, operations, bytes and memory go, line by line."
    ),
]
Waterfall = Annotated[
    Path | None,
    typer.Option(help="With --ledger: also write it to this HTML file, as a chart."),
]


def check_waterfall(path: Path | None, *, with_ledger: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse at once what would fail only after everything has been measured.

    inputs: files that are read, over which nothing is written.

    Raises:
        ConfigError: there is no ledger to draw, or the file could not be written.
    """
    if path is not None and not with_ledger:
        raise ConfigError("--waterfall draws a ledger; add --ledger")
    check_not_read(path, inputs)
    check_writable(path)


def print_ledgers(accounts: Sequence["Account"], file: TextIO | None = None) -> None:
    """A table for each account that stands against plain decoding, with what follows from it."""
    from rich.console import Console

    from blockdraft.bench.ledger.tables import (
        LEDGER_LEGEND,
        drafted_accounts,
        figure_lines,
        ledger_table,
    )

    file = file or sys.stdout
    console = Console(file=file, highlight=False)
    for account in drafted_accounts(accounts):
        console.print(ledger_table(account))
        print(*figure_lines(account), "", sep="\n", file=file)
    print(LEDGER_LEGEND, file=file)


def publish_ledgers(
    accounts: Sequence["Account"], waterfall: Path | None, about: str, *, as_json: bool
) -> None:
    """Print the accounts, unless JSON was, and draw them if a file was asked for."""
    if not as_json:
        print_ledgers(accounts)
    write_waterfall(waterfall, accounts, about)


def write_waterfall(path: Path | None, accounts: Sequence["Account"], about: str) -> None:
    """Draw the accounts, if a file was asked for."""
    if path is None:
        return
    from blockdraft.bench.ledger.page import render_page

    write_report(path, render_page(accounts, " · ".join(about.splitlines())))
