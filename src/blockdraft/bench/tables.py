"""Tables on the terminal and in Markdown. Loads no model library."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from blockdraft.bench.measures import Speedup, Spread


def empty_table(title: str, *headings: str) -> Table:
    """A table without rows; a column without a heading holds names, the others numbers."""
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in headings:
        view.add_column(heading, justify="right" if heading else "left")
    return view


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown; a bar in a cell stays a bar."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


def speedup_cell(speedup: "Speedup | None") -> str:
    """The value and below it its band; nothing without a speed-up."""
    if speedup is None:
        return ""
    if speedup.low is None or speedup.high is None:
        return f"{speedup.value:.2f}\n(one)"
    return f"{speedup.value:.2f}\n{speedup.low:.2f}-{speedup.high:.2f}"


def spread_cells(spread: "Spread") -> tuple[str, str]:
    """Median, and lowest to highest."""
    return (
        three_digits(spread.median),
        f"{three_digits(spread.low)}-{three_digits(spread.high)}",
    )


def tau_words(tau: float) -> str:
    """Nothing for 0: where no pass came after the prompt's, as for single tokens, there is none."""
    return f"{tau:.2f}" if tau else ""


def three_digits(value: float) -> str:
    """As many decimals as leave three digits, so that a column fits slow and fast machines."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
