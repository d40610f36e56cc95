"""The summary of the default pair: the tables of README.md and docs/benchmarks.md, and their plot.

`tools/summarize_pair.py` takes its figures from results of `bench speed`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blockdraft.bench.report.section import Grid, Section
from blockdraft.bench.report.svg import WIDTH, baseline_at, frame, words
from blockdraft.bench.result import Result, need
from blockdraft.bench.tables import markdown_table

Row = Mapping[str, Any]
Run = Mapping[str, Any]

LEFT, RIGHT, TOP = 270, 60, 64
ROW_HEIGHT, BAR_HEIGHT, GAP = 39, 14, 14
COLORS = {"greedy": "#0969da", "sampled": "#bc6b00"}
STYLE = """
text { font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #0d1117; }
  .words { fill: #e6edf3; }
  .greedy { fill: #4493f8; }
  .sampled { fill: #d29922; }
  .line { stroke: #9198a1; }
}
"""


def all_rows(run: Run) -> list[Row]:
    """The sets of a run, and all of its prompts together behind them."""
    return [*run["rows"], run["all"]]


def cells(figures: Mapping[str, Any] | None) -> list[str]:
    """Tau, and speed-up with the band in which 95 % of resamples of the prompts fall, if known."""
    if figures is None:
        return ["", ""]
    band = figures.get("band")
    spread = "" if band is None else f" ({band[0]:.2f}-{band[1]:.2f})"
    return [f"{figures['tau']:.2f}", f"{figures['speedup']:.2f}x{spread}"]


def small_table(results: Mapping[str, Any]) -> str:
    """One row a set, as README has it."""
    benchmarks, untuned = results["runs"]["benchmarks"], results["runs"]["untuned"]
    rows = [
        [
            f"{row['name']} ({row['num_prompts']})",
            *cells(row["greedy"]),
            f"{run['sampled_temperature']:g}",
            *cells(row["sampled"]),
        ]
        for run, chosen in ((benchmarks, all_rows(benchmarks)), (untuned, [untuned["all"]]))
        for row in chosen
    ]
    without_loops = benchmarks["all"]["without_loops"]
    name = f"the same without repetitive outputs ({without_loops['num_outputs']})"
    rows.insert(-1, [name, *cells(without_loops), "", "", ""])
    rows[-1] = [f"**{cell}**" for cell in rows[-1]]
    header = ["prompts", "greedy: tau", "speed-up", "sampled: temperature", "tau", "speed-up"]
    return markdown_table(header, rows)


def summary(results: Mapping[str, Any]) -> str:
    """What a reader should take away, the unflattering part first."""
    benchmarks, untuned = results["runs"]["benchmarks"], results["runs"]["untuned"]
    figures = untuned["all"]
    greedy, sampled = figures["greedy"]["speedup"], figures["sampled"]["speedup"]
    return (
        f"On {figures['num_prompts']} prompts of sets that were not used for training, drafted "
        f"decoding is\n**{greedy:.2f} times** as fast as plain "
        f"decoding when greedy, and **{sampled:.2f} times** at temperature "
        f"{untuned['sampled_temperature']:g}. On benchmark prompts it is\n"
        f"{benchmarks['all']['greedy']['speedup']:.2f} and "
        f"{benchmarks['all']['sampled']['speedup']:.2f} times (temperature "
        f"{benchmarks['sampled_temperature']:g}); the drafter was trained on related ones. "
        f"Measured on {results['machine']}.\n"
    )


def same_tokens(results: Mapping[str, Any]) -> str:
    """On how many outputs drafting changed nothing."""
    counts = [run["same_tokens"] for run in results["runs"].values()]
    same, all_outputs = (sum(c[key] for c in counts) for key in ("num_same", "num_outputs"))
    return f"Drafted and plain tokens were the same on {same} of {all_outputs} outputs.\n"


def whole_table(results: Mapping[str, Any]) -> str:
    """All figures of all runs."""
    return markdown_table(_HEADS, _whole_rows(results["runs"]))


_HEADS = (
    *("prompts", "number", "greedy: tau", "speed-up", "of them without loops", "tau", "speed-up"),
    *("temperature", "sampled: tau", "speed-up"),
)


def _whole_rows(runs: Mapping[str, Run]) -> list[list[str]]:
    return [
        [
            *(row["name"], str(row["num_prompts"]), *cells(row["greedy"])),
            str((row["without_loops"] or {}).get("num_outputs", "")),
            *cells(row["without_loops"]),
            *(f"{run['sampled_temperature']:g}", *cells(row["sampled"])),
        ]
        for run in runs.values()
        for row in all_rows(run)
    ]


def summary_section(result: Result) -> Section:
    """All figures of all runs, and their plot."""
    values = result.values
    about = (
        f"Speed-up over {values['baseline']}; in parentheses, the 95 % bootstrap interval over the "
        "prompts."
    )
    return Section(
        title=str(values["about"]),
        facts=[same_tokens(values).strip()],
        grids=[Grid("", about, _HEADS, _whole_rows(need(result, "runs")))],
        plots={"": plot(values)},
    )


def plot(results: Mapping[str, Any]) -> str:
    """Speed-ups as bars, in an SVG that is readable on light and dark pages."""
    parts: list[str] = []
    y, end = TOP, scale_end(results["runs"].values())
    for run in results["runs"].values():
        for row in all_rows(run):
            parts += bars(row, y, end)
            y += ROW_HEIGHT
        y += GAP
    height = y + 10
    parts += baseline_at(x_of(1.0, end), TOP - 6, height)
    title = words(20, 24, "Speed of drafted decoding; plain decoding is 1", weight="bold")
    label = "Speed of drafted over plain decoding, by set of prompts"
    return frame(label, height, [title, *legend(results["runs"]), *parts], STYLE)


def legend(runs: Mapping[str, Run]) -> Iterator[str]:
    """Which color is which."""
    first, *others = (f"{run['sampled_temperature']:g}" for run in runs.values())
    below = "" if set(others) <= {first} else f" (group below: {', '.join(others)})"
    names = {"greedy": "greedy", "sampled": f"sampled, temperature {first}{below}"}
    for (kind, color), x in zip(COLORS.items(), (LEFT, LEFT + 90), strict=True):
        yield f'<rect class="{kind}" x="{x}" y="38" width="12" height="12" fill="{color}"/>'
        yield words(x + 18, 49, names[kind])


def bars(row: Row, y: int, end: float) -> Iterator[str]:
    """The name and the two bars of a set, on a scale that ends at the speed-up end."""
    name = f"{row['name']} ({row['num_prompts']})"
    yield words(LEFT - 12, y + BAR_HEIGHT + 5, name, anchor="end")
    for index, (kind, color) in enumerate(COLORS.items()):
        speedup, top = row[kind]["speedup"], y + index * (BAR_HEIGHT + 2)
        yield (
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{x_of(speedup, end) - LEFT:.1f}" '
            f'height="{BAR_HEIGHT}" fill="{color}"/>'
        )
        x = x_of(max(speedup, 1.0), end) + 6
        yield words(x, top + BAR_HEIGHT - 2, f"{speedup:.2f}x")


def scale_end(runs: Iterable[Run]) -> float:
    """The speed-up at the end of the scale: a whole half that no bar is longer than."""
    rows = (row for run in runs for row in all_rows(run))
    longest: float = max(row[kind]["speedup"] for row in rows for kind in COLORS)
    return math.ceil(2 * longest) / 2


def x_of(speedup: float, end: float) -> float:
    """Where a speed-up lies on a scale that ends at end."""
    return round(LEFT + speedup / end * (WIDTH - LEFT - RIGHT), 1)
