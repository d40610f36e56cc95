"""Ledgers as waterfalls: one HTML page of still pictures that needs nothing else.

Each line's bar begins where the one before it ended, in milliseconds per output token, on one scale
for all ledgers of a page: what stands above another can be compared by eye.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blockdraft.bench.ledger.accounts import Account
from blockdraft.bench.ledger.tables import LINE_LABELS, figure_lines
from blockdraft.core.recorder import Line
from blockdraft.core.words import counted
from blockdraft.measure.ledger import Ledger
from blockdraft.report.render import render

_WIDTH, _LEFT, _RIGHT = 900, 170, 190
"""Of the picture, its labels, and the room for the numbers behind the longest bar."""
_ROW, _TOP = 24, 34

_KINDS: Mapping[Line, str] = {
    "free": "drafter",
    "draft_prefill": "drafter",
    "inject": "drafter",
    "draft": "drafter",
    "draft_head": "drafter",
    "guess": "drafter",
    "capture": "drafter",
    "prefill": "target",
    "accepted": "target",
    "bonus": "target",
    "siblings": "wasted",
    "wasted": "wasted",
}
"""What bars are colored by; every other line is the host's."""

_KIND_LABELS = {
    "target": "target, used",
    "wasted": "target, discarded",
    "drafter": "drafting",
    "host": "all else",
}


@dataclass(frozen=True, slots=True)
class _Mark:
    """An upright line at a round number."""

    x: str
    text: str


@dataclass(frozen=True, slots=True)
class _Bar:
    """A row: its name, a bar from where the one before it ended, and words behind it."""

    label: str
    kind: str
    y: int
    x: str
    width: str
    is_joined: bool
    text_x: str
    remark: str


@dataclass(frozen=True, slots=True)
class _Picture:
    """One ledger."""

    title: str
    figures: Sequence[str]
    summary: str
    height: int
    marks: Sequence[_Mark]
    bars: Sequence[_Bar]
    width: int = _WIDTH
    left: int = _LEFT
    top: int = _TOP


def render_page(accounts: Sequence[Account], about: str) -> str:
    """The page of these accounts; `about` says in a line what was run."""
    scale = max((_per_token(account.ledger) for account in accounts), default=0.0)
    return render(
        "ledger.html",
        title="blockdraft ledger",
        about=about,
        kinds=_KIND_LABELS,
        pictures=[_picture(account, scale) for account in accounts],
    )


def _picture(account: Account, scale: float) -> _Picture:
    """`scale` is the number of milliseconds per token at the right border."""
    ledger = account.ledger
    lines = [line for line in ledger.lines if line.nanoseconds]
    bars, begin = [], 0.0
    for index, line in enumerate(lines):
        length = _milliseconds(line.nanoseconds, ledger)
        share = line.nanoseconds / ledger.wall_nanoseconds
        kind = _KINDS.get(line.name, "host")
        label = LINE_LABELS[line.name]
        bars.append(_bar(index, label, kind, (begin, length, scale), f"{share:.1%}"))
        begin += length
    total = (0.0, _per_token(ledger), scale)
    bars.append(
        _bar(len(lines), "sum", "host", total, f"over {counted(ledger.num_tokens, 'token')}")
    )
    return _Picture(
        title=account.title,
        figures=figure_lines(account),
        summary="Per token: " + "; ".join(f"{bar.label} {bar.remark}" for bar in bars),
        height=_TOP + _ROW * (len(lines) + 1) + 8,
        marks=_marks(scale),
        bars=bars,
    )


def _bar(
    index: int, label: str, kind: str, extent: tuple[float, float, float], remark: str
) -> _Bar:
    begin, length, scale = extent
    x, end = _at(begin, scale), _at(begin + length, scale)
    return _Bar(
        label=label,
        kind=kind,
        y=_TOP + _ROW * index,
        x=f"{x:.1f}",
        width=f"{max(1.0, end - x):.1f}",
        is_joined=index > 0 and begin > 0,
        text_x=f"{max(x + 1, end) + 6:.1f}",
        remark=f"{length:.3f} ms, {remark}",
    )


def _marks(scale: float) -> list[_Mark]:
    step = _round_step(scale)
    marks, value = [], 0.0
    while value <= scale * 1.0001 and step:
        marks.append(_Mark(f"{_at(value, scale):.1f}", f"{value:g}"))
        value = round(value + step, 9)
    return marks


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
