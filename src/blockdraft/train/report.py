"""A page with the curves of a run, in one file that needs nothing else.

It is written anew at every evaluation, so it can be watched while the run goes on.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_whole
from blockdraft.report.render import Cell, Table, render
from blockdraft.train.run_log import best_of, read_log

PAGE = "index.html"
MAX_POINTS = 400
"""Points of a curve; more would only make the page heavy."""
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 84, 28
SMALLEST_RANGE = 1e-3
"""Of a chart's values, as a share of the largest: less is noise, drawn as if it were change."""
NUM_COLORS = 8
"""That the stylesheet has for curves."""

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Level:
    """A line across a chart, with its value."""

    x1: int
    x2: int
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A curve with the name and the last value that are listed below it; `css` is its look."""

    name: str
    last: str
    points: str
    end: tuple[str, str]
    css: str


@dataclass(frozen=True, slots=True)
class _Chart:
    """Curves over one axis from 0; `right` is its last value, with the unit."""

    title: str
    levels: Sequence[_Level]
    right: str
    curves: Sequence[_Drawn]


def write_report(folder: Path) -> Path:
    """Draw the log of a run; returns the page."""
    rows = list(read_log(folder))
    steps = [row for row in rows if "nll" in row]
    evaluations = [row for row in rows if "held_out" in row]
    charts = [
        (
            "Loss per step: cross entropy against the answers, and against the target's "
            "distribution",
            {
                "answers": _curve(steps, "nll"),
                "target's distribution": _curve(steps, "distill"),
            },
            "steps",
        ),
        (
            "Acceptance length: offline, in real decoding, and if slots were independent",
            _tau_curves(evaluations, lambda row: row["step"]),
            "steps",
        ),
        (
            "The same over millions of training tokens: what more training may bring",
            _tau_curves(
                [row for row in evaluations if "tokens" in row],
                lambda row: round(row["tokens"] / 1e6, 3),
            ),
            "million tokens",
        ),
        ("Acceptance length in real decoding, by set", _by_set(evaluations, "true_tau"), "steps"),
        ("Speed-up over plain decoding, median by set", _by_set(evaluations, "speedup"), "steps"),
        (
            "Share of correct draft tokens, by position",
            _accuracy(evaluations),
            "steps",
        ),
        ("Learning rate", {"learning rate": _curve(steps, "lr")}, "steps"),
    ]
    page = render(
        "run.html",
        title=folder.name,
        evaluations=_table(evaluations),
        charts=[
            _chart(title, curves, unit) for title, curves, unit in charts if any(curves.values())
        ],
        left=LEFT,
        width=WIDTH,
        height=HEIGHT,
    )
    write_whole(folder / PAGE, page)
    return folder / PAGE


def _curve(rows: Iterable[Mapping[str, Any]], name: str) -> Curve:
    return [(row["step"], row[name]) for row in rows if name in row]


def _tau_curves(
    evaluations: Sequence[Mapping[str, Any]], across: Callable[[Mapping[str, Any]], float]
) -> dict[str, Curve]:
    curves = {
        label: [(across(row), row["held_out"][name]) for row in evaluations]
        for label, name in (("offline", "tau"), ("independent slots", "marginal_tau"))
    }
    taus = [(across(row), row["true_tau"].get("all")) for row in evaluations]
    return curves | {"real": [(x, tau) for x, tau in taus if tau is not None]}


def _by_set(evaluations: Sequence[Mapping[str, Any]], name: str) -> dict[str, Curve]:
    sets = sorted({key for row in evaluations for key in row[name]})
    return {
        key: [(row["step"], row[name][key]) for row in evaluations if key in row[name]]
        for key in sets
    }


def _accuracy(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    num_slots = max((len(row["held_out"]["accuracy"]) for row in evaluations), default=0)
    return {
        f"slot {slot + 1}": [
            (row["step"], row["held_out"]["accuracy"][slot]) for row in evaluations
        ]
        for slot in range(num_slots)
    }


def _table(evaluations: Sequence[Mapping[str, Any]]) -> Table:
    """Offline and real tau of each evaluation, and how far the second is from the first."""
    heads = (
        "step",
        "minutes",
        "offline tau",
        "real tau",
        "real over offline",
        "speed-up",
        "drafter",
    )
    best = best_of(evaluations) if evaluations else None
    rows = []
    for row in evaluations:
        offline, real = row["held_out"]["tau"], row["true_tau"].get("all")
        cells = [str(row["step"]), f"{row['minutes']:.1f}", f"{offline:.3f}"]
        if real is None:
            cells += ["", "", ""]
        else:
            speedup = row["speedup"].get("all", 0.0)
            cells += [f"{real:.3f}", f"{real / offline - 1:+.1%}", f"{speedup:.2f}"]
        rows.append([Cell(text) for text in (*cells, "kept" if row is best else "")])
    about = (
        "Evaluations; the best drafter is kept. Tau, the acceptance length, is the number of "
        "tokens per pass of the target: offline on held-out answers, and real, in decoding. "
        "Speed-up is over plain decoding."
    )
    return Table("", about, heads, rows)


def _chart(title: str, curves: Mapping[str, Curve], unit: str) -> _Chart:
    curves = {name: _thinned(curve) for name, curve in curves.items() if curve}
    points = [point for curve in curves.values() for point in curve]
    right = max(x for x, _ in points) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    if high - low < SMALLEST_RANGE * abs(high):
        low, high = low - abs(high) / 2, high + abs(high) / 2
    elif high == low:
        low, high = low - 0.5, high + 0.5

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 8) * x / right
        return across, 8 + (HEIGHT - BOTTOM - 8) * (high - y) / (high - low)

    return _Chart(
        title=title,
        levels=[
            _Level(LEFT, WIDTH - 8, round(place(0, level)[1], 1), text)
            for level, text in _named((low, (low + high) / 2, high))
        ],
        right=f"{right:g} {unit}",
        curves=[
            _drawn(name, curve[-1][1], [place(*point) for point in curve], number)
            for number, (name, curve) in enumerate(curves.items())
        ],
    )


def _named(levels: Sequence[float]) -> Iterable[tuple[float, str]]:
    """Each with as few digits, from three on, as tell all of them apart."""
    for digits in range(3, 17):
        texts = [f"{level:.{digits}g}" for level in levels]
        if len(set(texts)) == len(texts):
            break
    return zip(levels, texts, strict=True)


def _drawn(name: str, last: float, places: Sequence[tuple[float, float]], number: int) -> _Drawn:
    """The curve of a chart that has this number; when the colors are used up, it is dashed."""
    points = [(f"{x:.1f}", f"{y:.1f}") for x, y in places]
    again = " again" if number >= NUM_COLORS else ""
    return _Drawn(
        name=name,
        last=f"{last:.3g}",
        points=" ".join(",".join(point) for point in points),
        end=points[-1],
        css=f"color-{number % NUM_COLORS}{again}",
    )


def _thinned(curve: Curve) -> Curve:
    """At most about MAX_POINTS points, evenly, the last one among them."""
    stride = -(-len(curve) // MAX_POINTS)
    return [*curve[:-1][::stride], curve[-1]]
