"""Ledgers as tables."""

from collections.abc import Sequence

from rich.table import Table

from blockdraft.bench.ledger.accounts import Account
from blockdraft.bench.tables import empty_table, three_digits
from blockdraft.core.recorder import Line
from blockdraft.measure.ledger import Ledger, LedgerLine, SourceUse

LINE_LABELS: dict[Line, str] = {
    "schedule": "scheduling",
    "free": "lookup, n-grams",
    "draft_prefill": "drafter prefill",
    "inject": "fusion, injection",
    "draft": "draft forward",
    "draft_head": "draft logits",
    "guess": "draft choice",
    "prefill": "target prefill",
    "accepted": "verify: accepted",
    "bonus": "verify: bonus",
    "siblings": "verify: siblings",
    "wasted": "verify: wasted",
    "capture": "feature capture",
    "choose": "choice, comparison",
    "commit": "commit, rollback",
    "controller": "controller",
    "stream": "text, streaming",
    "wait": "waiting",
    "remainder": "remainder",
}

LEDGER_LEGEND = """\
ms sum to the wall time; "verify" is one forward of the target, split by rows:
accepted draft tokens, one bonus per pass (all of plain decoding), and discarded
rows. per token: of output. rows: tokens or slots computed. Operations
(GFLOP) and bytes (GB) follow from the shapes; break-even: the tau at which
drafting would be as fast as plain decoding."""


def ledger_table(account: Account) -> Table:
    """One row per line that took time; fits 80 columns."""
    ledger, plain = account.ledger, account.plain
    headings = ("", "ms", "share", "ms per\ntoken", "rows", "GFLOP", "GB")
    view = empty_table(
        account.title, *headings, *([] if plain is None else ["plain:\nms per\ntoken"])
    )
    for line in ledger.lines:
        view.add_row(
            LINE_LABELS[line.name],
            *_cells(line, ledger),
            *([] if plain is None else [_plain_cell(line.name, plain)]),
        )
    view.add_section()
    view.add_row(
        "sum",
        f"{ledger.wall_nanoseconds / 1e6:,.1f}",
        "100.0 %",
        _per_token(ledger.wall_nanoseconds, ledger),
        "",
        _quantity(sum(line.flops for line in ledger.lines) / 1e9),
        _quantity(sum(line.num_bytes for line in ledger.lines) / 1e9),
        *([] if plain is None else [_per_token(plain.wall_nanoseconds, plain)]),
    )
    return view


def _cells(line: LedgerLine, ledger: Ledger) -> list[str]:
    rows = line.work.rows or line.work.head_rows
    return [
        f"{line.nanoseconds / 1e6:,.1f}",
        f"{line.nanoseconds / max(1, ledger.wall_nanoseconds):.1%}".replace("%", " %"),
        _per_token(line.nanoseconds, ledger),
        f"{rows:,}" if rows else "",
        _quantity(line.flops / 1e9),
        _quantity(line.num_bytes / 1e9),
    ]


def _plain_cell(name: Line, plain: Ledger) -> str:
    found = [line.nanoseconds for line in plain.lines if line.name == name]
    return _per_token(found[0], plain) if found else ""


def _per_token(nanoseconds: int, ledger: Ledger) -> str:
    return f"{nanoseconds / 1e6 / ledger.num_tokens:.3f}" if ledger.num_tokens else ""


def _quantity(value: float) -> str:
    return three_digits(value) if value else ""


def figure_lines(account: Account) -> list[str]:
    """What follows from a ledger, a line each."""
    ledger, memory = account.ledger, account.ledger.memory
    lines = ["nothing was decoded after prefill: there is no tau"]
    if ledger.num_passes:
        lines = [
            f"target rows per token {ledger.rows_per_token:.2f}, {ledger.wasted_share:.0%} wasted, "
            f"tau {ledger.acceptance_length:.2f}"
        ]
    if len(ledger.sources) > 1:
        lines.append("candidates of " + ", ".join(map(_source_cell, ledger.sources)))
    margin = account.margin
    if margin is not None:
        lines.append(
            f"break-even tau {margin.break_even_tau:.2f}: drafting gains {margin.margin:+.0%} in "
            f"decoding, {margin.overall_margin:+.0%} with prefill"
        )
    if memory.total and account.plain is not None:
        parts = {
            "weights": memory.weights,
            "packed copies": memory.weight_copies,
            "draft K/V": memory.context,
            "waiting features": memory.waiting_features,
        }
        listed = ", ".join(f"{name} {_mib(size)}" for name, size in parts.items())
        lines.append(f"{_mib(memory.total)} MiB for drafting: {listed}")
    waited = sum(line.waited_nanoseconds for line in ledger.lines)
    if waited:
        lines.append(f"of the time, {waited / 1e6:,.1f} ms were waiting for the device")
    return lines


def _source_cell(use: SourceUse) -> str:
    return f"{use.name} {use.num_verified:,}, {use.num_kept / use.num_verified:.0%} accepted"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def drafted_accounts(accounts: Sequence[Account]) -> list[Account]:
    """Those to show: where plain decoding stands beside another account, not by itself too."""
    return [a for a in accounts if a.plain is not None] or list(accounts)
