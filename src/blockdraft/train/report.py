"""A page with the curves of a run, in one file that needs nothing else.

It is written anew at every evaluation, so it can be watched while the run goes on.
"""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockdraft.core.files import write_whole
from blockdraft.train.run_log import best_of, read_log

PAGE = "index.html"
MAX_POINTS = 400
"""Points of a curve; more would only make the page heavy."""
WIDTH, HEIGHT, LEFT, BOTTOM = 560, 240, 56, 28
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")

Curve = Sequence[tuple[float, float]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; color: #1f2937;
  padding: 0 1rem; background: #fff }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem }
figure { margin: 0; width: 560px } figcaption { font-weight: 600 } svg { background: #f9fafb }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb }
"""


def write_report(folder: Path) -> Path:
    """Draw the log of a run; returns the page."""
    rows = list(read_log(folder))
    steps = [row for row in rows if "nll" in row]
    evaluations = [row for row in rows if "held_out" in row]
    charts = [
        (
            "Loss a step: cross entropy on the answers, and on the target's distribution",
            {name: _curve(steps, name) for name in ("nll", "distill")},
        ),
        (
            "Acceptance length: offline, in real decoding, and if slots were independent",
            _tau_curves(evaluations, lambda row: row["step"]),
        ),
        (
            "The same over millions of tokens seen: what more training may bring",
            _tau_curves(
                [row for row in evaluations if "tokens" in row],
                lambda row: round(row["tokens"] / 1e6, 3),
            ),
        ),
        ("Acceptance length in real decoding, by set", _by_set(evaluations, "true_tau")),
        ("Speed-up over plain decoding, median by set", _by_set(evaluations, "speedup")),
        ("Share of right guesses, by slot behind the anchor", _accuracy(evaluations)),
        ("Learning rate", {"lr": _curve(steps, "lr")}),
    ]
    drawn = "".join(_chart(title, curves) for title, curves in charts if any(curves.values()))
    name = html.escape(folder.name)
    text = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>'
        f"<style>{_STYLE}</style><h1>{name}</h1>{_table(evaluations)}"
        f'<div class="charts">{drawn}</div>'
        "<p>Curves are over steps unless they say otherwise.</p></html>\n"
    )
    write_whole(folder / PAGE, text)
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


def _table(evaluations: Sequence[Mapping[str, Any]]) -> str:
    """Offline and real tau of each evaluation, and the gap between the two."""
    heads = ("step", "minutes", "offline tau", "real tau", "gap", "speed-up")
    best = best_of(evaluations) if evaluations else None
    lines = []
    for row in evaluations:
        offline, real = row["held_out"]["tau"], row["true_tau"].get("all")
        cells = [str(row["step"]), f"{row['minutes']:.1f}", f"{offline:.3f}"]
        if real is None:
            cells += ["", "", ""]
        else:
            speedup = row["speedup"].get("all", 0.0)
            cells += [f"{real:.3f}", f"{real / offline - 1:+.1%}", f"{speedup:.2f}"]
        mark = " *" if row is best else ""
        lines.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f"<td>{mark}</td>")
    head = "".join(f"<th>{text}</th>" for text in heads)
    return f"<table><tr>{head}<th></th></tr>{''.join(lines)}</table><p>* kept as the best</p>"


def _chart(title: str, curves: Mapping[str, Curve]) -> str:
    """One chart as SVG; each curve is listed with its last value."""
    curves = {name: _thinned(curve) for name, curve in curves.items() if curve}
    points = [point for curve in curves.values() for point in curve]
    right = max(x for x, _ in points) or 1
    low, high = min(y for _, y in points), max(y for _, y in points)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 8) * x / right
        return across, 8 + (HEIGHT - BOTTOM - 8) * (high - y) / (high - low)

    parts = []
    for level in (low, (low + high) / 2, high):
        _, y = place(0, level)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#d1d5db"/>'
            + _label(LEFT - 6, y + 4, f"{level:.3g}")
        )
    parts.append(_label(WIDTH - 8, HEIGHT - 8, f"{right:g}"))
    legend = []
    for number, (name, curve) in enumerate(curves.items()):
        color = COLORS[number % len(COLORS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend.append(
            f'<span style="color:{color}">&#9632;</span> {html.escape(name)} {curve[-1][1]:.3g}'
        )
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(parts)}</svg>'
        f"<div>{' &nbsp; '.join(legend)}</div></figure>"
    )


def _label(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" text-anchor="end" font-size="11">{text}</text>'


def _thinned(curve: Curve) -> Curve:
    """At most about MAX_POINTS points, evenly, the last one among them."""
    stride = -(-len(curve) // MAX_POINTS)
    return [*curve[:-1][::stride], curve[-1]]
