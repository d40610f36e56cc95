"""Write the plot and the tables of README.md and docs/benchmarks.md from docs/results.

python tools/results.py          writes docs/results/default-pair.svg, and the tables between the
                                 marks `<!-- results -->` and `<!-- end of results -->`
python tools/results.py --check  writes nothing, and exits with 1 if a file is out of date
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("docs/results/default-pair.json")
PLOT = RESULTS.with_suffix(".svg")
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
Row = Mapping[str, Any]
Run = Mapping[str, Any]

WIDTH, LEFT, RIGHT, TOP = 760, 270, 60, 64
ROW_HEIGHT, BAR_HEIGHT, GAP = 39, 14, 14
MAX_SPEEDUP = 2.0
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells(figures: Mapping[str, float] | None) -> list[str]:
    """Tau and speed-up."""
    return ["", ""] if figures is None else [f"{figures['tau']:.2f}", f"{figures['speedup']:.2f}x"]


def small_table(results: Mapping[str, Any]) -> str:
    """One row a set, as README has it."""
    benchmarks, untuned = results["runs"]["benchmarks"], results["runs"]["untuned"]
    rows = [
        [
            f"{row['name']} ({row['num_prompts']})",
            *cells(row["greedy"]),
            heat,
            *cells(row["sampled"]),
        ]
        for run, chosen in ((benchmarks, all_rows(benchmarks)), (untuned, [untuned["all"]]))
        for heat in [f"{run['sampled_temperature']:g}"]
        for row in chosen
    ]
    straight = benchmarks["all"]["without_loops"]
    name = f"the same without repetitive outputs ({straight['num_outputs']})"
    rows.insert(-1, [name, *cells(straight), "", "", ""])
    rows[-1] = [f"**{cell}**" for cell in rows[-1]]
    header = ["prompts", "greedy: tau", "speed-up", "sampled: temperature", "tau", "speed-up"]
    return table(header, rows)


def summary(results: Mapping[str, Any]) -> str:
    """What a reader should take away, the unflattering part first."""
    benchmarks, untuned = results["runs"]["benchmarks"], results["runs"]["untuned"]
    figures = untuned["all"]
    greedy, sampled = figures["greedy"]["speedup"], figures["sampled"]["speedup"]
    return (
        f"On {figures['num_prompts']} prompts of sets that no training prompt came from, drafted "
        f"decoding is only\n**{greedy:.2f} times** as fast as plain "
        f"decoding when greedy, and **{sampled:.2f} times** at temperature "
        f"{untuned['sampled_temperature']:g}. On benchmark prompts it is\n"
        f"{benchmarks['all']['greedy']['speedup']:.2f} times as fast when greedy, and "
        f"{benchmarks['all']['sampled']['speedup']:.2f} times at temperature "
        f"{benchmarks['sampled_temperature']:g}. Measured on {results['machine']}.\n"
    )


def same_tokens(results: Mapping[str, Any]) -> str:
    """On how many outputs drafting changed nothing."""
    counts = [run["same_tokens"] for run in results["runs"].values()]
    same, all_outputs = (sum(c[key] for c in counts) for key in ("num_same", "num_outputs"))
    return f"Drafted and plain tokens were the same on {same} of {all_outputs} outputs.\n"


def whole_table(results: Mapping[str, Any]) -> str:
    """All figures of all runs."""
    rows = []
    for run in results["runs"].values():
        for row in all_rows(run):
            straight = row["without_loops"]
            left = "" if straight is None else str(straight["num_outputs"])
            head = [row["name"], str(row["num_prompts"]), *cells(row["greedy"])]
            tail = [f"{run['sampled_temperature']:g}", *cells(row["sampled"])]
            rows.append([*head, left, *cells(straight), *tail])
    header = ["prompts", "number", "greedy: tau", "speed-up", "of them without loops", "tau"]
    return table([*header, "speed-up", "temperature", "sampled: tau", "speed-up"], rows)


def plot(results: Mapping[str, Any]) -> str:
    """Speed-ups as bars, in an SVG that is readable on light and dark pages."""
    parts: list[str] = []
    y = TOP
    for run in results["runs"].values():
        for row in all_rows(run):
            parts += bars(row, y)
            y += ROW_HEIGHT
        y += GAP
    height = y + 10
    plain, colors = x_of(1.0), legend(results["runs"])
    body = "\n".join(
        [
            f'<rect class="ground" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            words(20, 24, "Speed of drafted decoding; plain decoding is 1", weight="bold"),
            *colors,
            *parts,
            f'<line class="line" x1="{plain}" x2="{plain}" y1="{TOP - 6}" y2="{height - 24}" '
            'stroke="#59636e" stroke-dasharray="4 3"/>',
            words(plain, height - 8, "plain", anchor="middle"),
        ]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="Speed of drafted over plain decoding, by set of prompts">\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def legend(runs: Mapping[str, Run]) -> Iterator[str]:
    """Which color is which."""
    first, *others = (f"{run['sampled_temperature']:g}" for run in runs.values())
    heats = first if set(others) <= {first} else f"{first} (last row {others[-1]})"
    yield f'<rect class="greedy" x="{LEFT}" y="38" width="12" height="12" fill="#0969da"/>'
    yield words(LEFT + 18, 49, "greedy")
    yield f'<rect class="sampled" x="{LEFT + 90}" y="38" width="12" height="12" fill="#bc6b00"/>'
    yield words(LEFT + 108, 49, f"sampled, temperature {heats}")


def bars(row: Row, y: int) -> Iterator[str]:
    """The name and the two bars of a set."""
    name = f"{row['name']} ({row['num_prompts']})"
    yield words(LEFT - 12, y + BAR_HEIGHT + 5, name, anchor="end")
    for index, (kind, color) in enumerate((("greedy", "#0969da"), ("sampled", "#bc6b00"))):
        speedup, top = row[kind]["speedup"], y + index * (BAR_HEIGHT + 2)
        yield (
            f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{x_of(speedup) - LEFT:.1f}" '
            f'height="{BAR_HEIGHT}" fill="{color}"/>'
        )
        yield words(max(x_of(speedup), x_of(1.0)) + 6, top + BAR_HEIGHT - 2, f"{speedup:.2f}x")


def x_of(speedup: float) -> float:
    """Where a speed-up lies."""
    return round(LEFT + speedup / MAX_SPEEDUP * (WIDTH - LEFT - RIGHT), 1)


def words(x: float, y: int, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    """One line of text."""
    return (
        f'<text class="words" x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#1f2328">{escape(text)}</text>'
    )


def between_marks(text: str, content: str, path: Path) -> str:
    """The text with other content between the marks."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{path} lacks the mark {(END if begin else BEGIN).strip()!r}; put it in")
    return f"{head}{begin}\n{content}\n{end}{tail}"


def documents(results: Mapping[str, Any], root: Path = ROOT) -> dict[Path, str]:
    """What each file should hold."""
    written = {PLOT: plot(results)}
    for path, content in (
        (Path("README.md"), f"{summary(results)}\n{small_table(results)}"),
        (Path("docs/benchmarks.md"), f"{whole_table(results)}\n{same_tokens(results)}"),
    ):
        written[path] = between_marks((root / path).read_text(encoding="utf-8"), content, path)
    return written


def read_results(root: Path = ROOT) -> dict[str, Any]:
    """The committed figures."""
    results: dict[str, Any] = json.loads((root / RESULTS).read_text(encoding="utf-8"))
    return results


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = []
    for path, text in documents(read_results()).items():
        file = ROOT / path
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            stale.append(str(path))
            if not args.check:
                file.write_text(text, encoding="utf-8")
    print(f"{'out of date' if args.check else 'written'}: {', '.join(stale) or 'nothing'}")
    raise SystemExit(1 if stale and args.check else 0)


if __name__ == "__main__":
    main()
