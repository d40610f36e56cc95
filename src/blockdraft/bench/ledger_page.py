"""Ledgers as waterfalls: one HTML page of still pictures that needs nothing else.

Each line's bar begins where the one before it ended, in milliseconds per output token, on one scale
for all ledgers of a page: what stands above another can be compared by eye.
"""

from collections.abc import Mapping, Sequence
from html import escape

from blockdraft.bench.ledger import Account
from blockdraft.bench.ledger_report import LINE_LABELS, figure_lines
from blockdraft.core.recorder import Line
from blockdraft.measure.ledger import Ledger

_WIDTH, _LEFT, _RIGHT = 900, 170, 190
"""Of the picture, its labels, and the room for the numbers behind the longest bar."""
_ROW, _BAR, _TOP = 24, 15, 34

_KINDS: Mapping[Line, str] = {
    "draft_prefill": "drafter",
    "inject": "drafter",
    "draft": "drafter",
    "draft_head": "drafter",
    "guess": "drafter",
    "capture": "drafter",
    "prefill": "target",
    "accepted": "target",
    "bonus": "target",
    "wasted": "wasted",
}
"""What bars are colored by; every other line is the host's."""

_KIND_LABELS = {
    "target": "target, used",
    "wasted": "target, thrown away",
    "drafter": "drafting",
    "host": "all else",
}

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --text: #1a1a1a; --faint: #5f6368;
  --grid: #d9dce0; --target: #0072b2; --wasted: #d55e00; --drafter: #b3861a; --host: #7a7f86; }
@media (prefers-color-scheme: dark) { :root { --ground: #15171a; --text: #e8eaed;
  --faint: #a3a8ae; --grid: #34383e; --target: #56b4e9; --wasted: #ff8a4c; --drafter: #e6b84d;
  --host: #8d939b; } }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; overflow-wrap: anywhere;
  background: var(--ground);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; }
p { margin: .2rem 0; } .faint { color: var(--faint); }
svg { width: 100%; height: auto; display: block; margin-top: .4rem; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 42rem; }
svg text { fill: var(--text); font-size: 14px; font-variant-numeric: tabular-nums; }
svg .small { fill: var(--faint); font-size: 12px; }
.grid { stroke: var(--grid); } .join { stroke: var(--faint); stroke-dasharray: 2 3; }
.target { fill: var(--target); background: var(--target); }
.wasted { fill: url(#hatch); background: var(--wasted); }
.drafter { fill: var(--drafter); background: var(--drafter); }
.host { fill: var(--host); background: var(--host); }
#hatch rect { fill: var(--wasted); } #hatch path { stroke: var(--ground); stroke-width: 2; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .35rem 0 1rem; }
.key.wasted { background: repeating-linear-gradient(45deg, var(--wasted) 0 4px,
  var(--ground) 4px 6px); }
"""

_HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>'
    '<pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="7" height="7"/><path d="M0 0V7"/></pattern>'
    "</defs></svg>"
)


def render_page(accounts: Sequence[Account], about: str) -> str:
    """The page of these accounts; `about` says in a line what was run."""
    scale = max((_per_token(account.ledger) for account in accounts), default=0.0)
    keys = "".join(
        f'<span class="key {kind}"></span>{label}' for kind, label in _KIND_LABELS.items()
    )
    sections = "\n".join(_section(account, scale) for account in accounts)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'">
<title>blockdraft ledger</title><style>{_STYLE}</style></head><body>{_HATCH}
<h1>Where the time goes</h1>
<p class="faint">{escape(about)}</p>
<p class="faint">Milliseconds per output token, on one scale. The bars of a picture add up to the
wall time; "verify" is one forward of the target, split by its rows.</p>
<p>{keys}</p>
{sections}
</body></html>
"""


def _section(account: Account, scale: float) -> str:
    figures = "".join(f"<p>{escape(line)}</p>" for line in figure_lines(account))
    return f"<h2>{escape(account.title)}</h2>\n{figures}\n{waterfall(account.ledger, scale)}"


def waterfall(ledger: Ledger, scale: float) -> str:
    """One ledger as SVG; `scale` is the number of milliseconds per token at the right border."""
    lines = [line for line in ledger.lines if line.nanoseconds]
    height = _TOP + _ROW * (len(lines) + 1) + 8
    rows, begin = [], 0.0
    for index, line in enumerate(lines):
        length = _milliseconds(line.nanoseconds, ledger)
        share = line.nanoseconds / ledger.wall_nanoseconds
        kind = _KINDS.get(line.name, "host")
        label = LINE_LABELS[line.name]
        rows.append(_bar(index, label, kind, (begin, length, scale), f"{share:.1%}"))
        begin += length
    total = (0.0, _per_token(ledger), scale)
    rows.append(_bar(len(lines), "sum", "host", total, f"{ledger.num_tokens} tokens"))
    summary = f"Waterfall of {len(lines)} lines, {_per_token(ledger):.2f} ms per token"
    return (
        f'<div class="scroll"><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{summary}">{_grid(scale, height)}{"".join(rows)}</svg></div>'
    )


def _bar(index: int, label: str, kind: str, extent: tuple[float, float, float], remark: str) -> str:
    """A row: its name, a bar from where the one before it ended, milliseconds and a remark."""
    begin, length, scale = extent
    y = _TOP + _ROW * index
    x, end = _at(begin, scale), _at(begin + length, scale)
    join = "" if index == 0 or not begin else f'<path class="join" d="M{x:.1f} {y - 9}V{y}"/>'
    return (
        f'<text x="{_LEFT - 10}" y="{y + 12}" text-anchor="end">{escape(label)}</text>{join}'
        f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{max(1.0, end - x):.1f}" '
        f'height="{_BAR}"/>'
        f'<text class="small" x="{max(x + 1, end) + 6:.1f}" y="{y + 12}">{length:.3f} ms, '
        f"{escape(remark)}</text>"
    )


def _grid(scale: float, height: int) -> str:
    """Upright lines at round numbers, with their values above."""
    step = _round_step(scale)
    marks, value = [], 0.0
    while value <= scale * 1.0001 and step:
        x = _at(value, scale)
        marks.append(
            f'<path class="grid" d="M{x:.1f} {_TOP - 8}V{height - 6}"/>'
            f'<text class="small" x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{value:g}</text>'
        )
        value = round(value + step, 9)
    return "".join(marks)


def _round_step(scale: float) -> float:
    """1, 2 or 5 times a power of ten, so that about five steps fit."""
    if scale <= 0:
        return 0.0
    power = 10.0
    while power > scale:
        power /= 10
    while power * 10 <= scale:
        power *= 10
    return next(step * power for step in (0.2, 0.5, 1.0, 2.0) if scale / (step * power) <= 6)


def _at(value: float, scale: float) -> float:
    room = _WIDTH - _LEFT - _RIGHT
    return _LEFT + (room * value / scale if scale else 0.0)


def _milliseconds(nanoseconds: int, ledger: Ledger) -> float:
    return nanoseconds / 1e6 / max(1, ledger.num_tokens)


def _per_token(ledger: Ledger) -> float:
    return _milliseconds(ledger.wall_nanoseconds, ledger)
