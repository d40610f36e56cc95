"""Plots as SVG, for light and dark pages. Loads no model library."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape, quoteattr


def without_style(plot: str) -> str:
    """A plot, for a page."""
    return re.sub(r"<style>.*?</style>\n", "", plot, flags=re.DOTALL)


def words(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    """One line of text."""
    return (
        f'<text class="words" x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="#1f2328">{escape(text)}</text>'
    )


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured point of a line, and what it is called beside it where there is room."""

    x: float
    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar with the ends of its spread, if there is one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


COLORS = ("#0969da", "#bc6b00", "#007a5a", "#8250df", "#a40e6f", "#59636e")
"""Of lines and bars, in turn; each has a shape of its points too."""
STYLE = """
text { font: 13px system-ui, sans-serif; }
.small { font-size: 11px; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #0d1117; }
  .words { fill: #e6edf3; }
  .line { stroke: #9198a1; } .spread { stroke: #e6edf3; }
  .way-0 { color: #4493f8; } .way-1 { color: #d29922; } .way-2 { color: #3fb68b; }
  .way-3 { color: #ab7df8; } .way-4 { color: #f778ba; } .way-5 { color: #9198a1; }
}
"""
"""Of a plot in a file of its own; a page has its own stylesheet."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 70, 30, 60, 60


def line_plot(
    title: str,
    x_title: str,
    y_title: str,
    lines: Mapping[str, Sequence[Dot]],
) -> str:
    """Lines through measured points, both axes from 0."""
    dots = [dot for line in lines.values() for dot in line]
    right, top = (_round_up(max(values)) for values in ([d.x for d in dots], [d.y for d in dots]))
    num_rows = (len(lines) + 2) // 3
    top_edge = TOP + 20 * num_rows

    def x_of(value: float) -> float:
        return round(LEFT + value / right * (WIDTH - LEFT - RIGHT), 1)

    def y_of(value: float) -> float:
        return round(HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - top_edge), 1)

    parts = [words(20, 24, title, weight="bold")]
    for index, name in enumerate(lines):
        left, down = LEFT + 225 * (index % 3), 48 + 20 * (index // 3)
        parts += [_marker(index, left + 6, down - 4), words(left + 18, down, _cut(name, 28))]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = x_of(share * right), y_of(share * top)
        parts += [
            f'<line class="line" x1="{x_of(0)}" x2="{x_of(right)}" y1="{y}" y2="{y}" '
            'stroke="#59636e" stroke-opacity="0.3"/>',
            words(LEFT - 8, y + 4, f"{share * top:g}", anchor="end"),
            words(x, HEIGHT - BOTTOM + 20, f"{share * right:g}", anchor="middle"),
        ]
    parts += [
        words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_title, anchor="middle"),
        words(LEFT, top_edge - 12, y_title, anchor="start"),
    ]
    taken: list[tuple[float, float]] = []
    labels: list[str] = []  # drawn last: no line lies over them
    for index, line in enumerate(lines.values()):
        points = " ".join(f"{x_of(dot.x)},{y_of(dot.y)}" for dot in line)
        parts.append(
            f'<polyline class="way-{index % len(COLORS)}" points="{points}" fill="none" '
            f'color="{COLORS[index % len(COLORS)]}" stroke="currentColor" stroke-width="2"/>'
        )
        for dot in line:
            x, y = x_of(dot.x), y_of(dot.y)
            parts.append(_marker(index, x, y))
            # Where dots lie close together, the numbers of their neighbors have to do.
            if dot.label and (free := _free_place(x, y, taken)):
                taken.append(free)
                label = words(*free, dot.label)
                labels.append(label.replace('class="words"', 'class="words small"'))
    return frame(title, HEIGHT, [*parts, *labels])


def bar_plot(title: str, bars: Sequence[Bar]) -> str:
    """Speed-ups as bars from 0, with their spread, and a line at plain decoding, which is 1."""
    left, step = 270, 26
    right = max(1.2, *(bar.value if bar.high is None else bar.high for bar in bars)) * 1.05
    height = 50 + step * len(bars) + 30

    def x_of(value: float) -> float:
        return round(left + value / right * (WIDTH - left - 70), 1)

    parts = [words(20, 24, title, weight="bold")]
    for index, bar in enumerate(bars):
        y = 44 + step * index
        end = bar.value if bar.high is None else bar.high
        parts += [
            words(left - 12, y + 13, _cut(bar.name, 36), anchor="end"),
            f'<rect class="way-0" x="{left}" y="{y}" width="{x_of(bar.value) - left:.1f}" '
            f'height="16" color="{COLORS[0]}" fill="currentColor"/>',
            words(max(x_of(end), x_of(1.0)) + 6, y + 13, f"{bar.value:.2f}x"),
        ]
        if bar.low is not None and bar.high is not None:
            low, high, middle = x_of(bar.low), x_of(bar.high), y + 8
            parts.append(
                f'<path class="spread" d="M{low} {middle}H{high}M{low} {y + 3}v10M{high} {y + 3}'
                'v10" stroke="#1f2328" stroke-width="1.5" fill="none"/>'
            )
    parts += baseline_at(x_of(1.0), 38, height)
    return frame(title, height, parts)


def baseline_at(x: float, top: int, height: int) -> list[str]:
    """An upright line for plain decoding, and its name below."""
    return [
        f'<line class="line" x1="{x}" x2="{x}" y1="{top}" y2="{height - 24}" '
        'stroke="#59636e" stroke-dasharray="4 3"/>',
        words(x, height - 8, "plain", anchor="middle"),
    ]


def frame(label: str, height: int, parts: Sequence[str], style: str = STYLE) -> str:
    """The whole file; `label` is what a screen reader says."""
    body = "\n".join(
        [f'<rect class="ground" width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img" aria-label={quoteattr(label)}>\n'
        f"<style>{style}</style>\n{body}\n</svg>\n"
    )


def _marker(index: int, x: float, y: float) -> str:
    """A circle, a square or a diamond, so that no one needs to see colors."""
    shapes = (
        f"M{x - 4} {y}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0",
        f"M{x - 4} {y - 4}h8v8h-8z",
        f"M{x} {y - 5}l5 5l-5 5l-5 -5z",
    )
    return (
        f'<path class="way-{index % len(COLORS)}" d="{shapes[index % 3]}" '
        f'color="{COLORS[index % len(COLORS)]}" fill="currentColor"/>'
    )


def _cut(name: str, most: int) -> str:
    """At most so many characters: a longer one would lie over its neighbors or leave the plot.

    The ends of paths tell more than their beginnings.
    """
    if len(name) <= most:
        return name
    head = most // 3
    return f"{name[:head]}…{name[head + 1 - most :]}"


def _free_place(
    x: float, y: float, taken: Sequence[tuple[float, float]]
) -> tuple[float, float] | None:
    """Where the label of a dot begins: beside it, away from other labels; None if nowhere."""
    for place in ((x + 7, y - 6), (x + 7, y + 14), (x - 20, y + 14), (x - 20, y - 6)):
        if all(abs(place[0] - left) >= 18 or abs(place[1] - low) >= 11 for left, low in taken):
            return place
    return None


def _round_up(value: float) -> float:
    """To 1, 2, 3, 4, 5, 6, 8 or 10 times a power of ten."""
    power = 10.0 ** floor(log10(value)) if value > 0 else 1.0
    steps = (1, 2, 3, 4, 5, 6, 8, 10)
    return next(step * power for step in steps if step * power >= value * 0.999999)
