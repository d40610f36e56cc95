"""What the sections of a report are made of: tables, facts, plots, and the words of their cells."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockdraft.bench.report import svg
from blockdraft.bench.result import Result
from blockdraft.bench.tables import tau_words, three_digits
from blockdraft.core.errors import ConfigError
from blockdraft.core.words import choice_of

Values = Mapping[str, Any]
Cells = Mapping[str, str]
"""Of a row, by the head of their column."""

BAND = "Speed-ups with 95 % bootstrap intervals over the prompts."
NO_SPREAD = " (one prompt, no spread)"
ONE_PROMPT = "A speed-up or rate without an interval comes from one prompt."


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; `about` says what its figures are, the first cell of a row names it."""

    title: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. `plots`: SVG files by what stands behind the name of the result."""

    title: str
    facts: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    plots: Mapping[str, str] = field(default_factory=dict)
    definitions: Mapping[str, str] = field(default_factory=dict)

    @property
    def page_plots(self) -> list[str]:
        """The same for a page, which has its own stylesheet."""
        return [svg.without_style(plot) for plot in self.plots.values()]


def grid_of(title: str, about: str, rows: Sequence[Cells]) -> Grid:
    """A table of these rows; a cell that one lacks is empty."""
    heads = list(dict.fromkeys(head for row in rows for head in row))
    return Grid(title, about, heads, [[row.get(head, "") for head in heads] for row in rows])


def without_repeats(grid: Grid, mark: str = "", told: str = ONE_PROMPT) -> Grid:
    """The same, with the words for a missing interval once above it, and `mark` in the cells."""
    rows = [[cell.replace(NO_SPREAD, mark) for cell in row] for row in grid.rows]
    return grid if rows == grid.rows else replace(grid, about=f"{grid.about} {told}", rows=rows)


def need_plain(result: Result, rows: Iterable[Values]) -> None:
    """Refuse rows without the baseline.

    Raises:
        ConfigError: plain decoding was not measured.
    """
    if not any(row["way"] == "plain" for row in rows):
        raise ConfigError(f"{result.path} lacks the baseline, plain decoding; measure again")


def how_words(config: Values) -> str:
    """How requests were decoded."""
    choice = choice_of(float(config.get("temperature", 0.0)))
    return f"{choice}, at most {config['max_tokens']} tokens"


def spread_words(spread: Values | None) -> str:
    """A median or value, and in brackets the ends."""
    if spread is None:
        return ""
    middle = spread["median"] if "median" in spread else spread["value"]
    if spread["low"] is None:
        return f"{three_digits(middle)}{NO_SPREAD}"
    ends = f"{three_digits(spread['low'])}-{three_digits(spread['high'])}"
    return f"{three_digits(middle)} ({ends})"


def tau_cell(measures: Values | None) -> str:
    """Over all outputs together; nothing where there were none, or no pass behind the prompts'."""
    return "" if measures is None else tau_words(measures["tau_micro"])


_LATENCIES = {
    "TTFT ms": "first_token_seconds",
    "TPOT ms": "seconds_per_token",
    "largest gap ms": "largest_gap",
}


def latency_cells(measures: Values | None) -> Cells:
    """In milliseconds: median and 95th percentile."""
    return {head: _latency(measures and measures[name]) for head, name in _LATENCIES.items()}


def _latency(found: Values | None) -> str:
    if found is None:
        return ""
    return f"{three_digits(1000 * found['p50'])}, {three_digits(1000 * found['p95'])}"


def bar_of(name: str, band: Values) -> svg.Bar:
    """A speed-up and its band."""
    return svg.Bar(name, band["value"], band["low"], band["high"])
