"""Explanations in a terminal: readable without color, by brackets and underlines."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from blockdraft.core.words import counted
from blockdraft.diagnose.explain.groups import Group
from blockdraft.diagnose.explain.round import CAUSE_LABELS, CAUSES, Rejection, Round
from blockdraft.diagnose.explain.run import Explanation
from blockdraft.diagnose.explain.stream import Streams, Timeline
from blockdraft.diagnose.explain.sums import Sums, Tally
from blockdraft.text.kinds import KINDS
from blockdraft.text.pieces import printable, visible

OPEN, CLOSE = "‹", "›"
"""Around drafts that were kept."""
DRAFTED = "underline bright_blue"
"""Kept drafts. What the target chose itself is in the terminal's own color."""
REJECTED = "bold yellow"
UNSEEN = "dim"
"""Drafts behind the rejected one, which nobody looked at."""

LEGEND = f"{OPEN}drafted and accepted{CLOSE}, the rest chosen by the target itself"


def draft_text(explanation: Explanation) -> Text:
    """The output, kept drafts underlined and in brackets."""
    text = Text()
    for one in explanation.rounds:
        pieces = explanation.pieces[one.start : one.start + len(one.token_ids)]
        kept = printable("".join(pieces[: one.num_kept]))
        if kept:
            text.append(OPEN + kept + CLOSE, style=DRAFTED)
        text.append(printable("".join(pieces[one.num_kept :])))
    return text


def rounds_table(explanation: Explanation) -> Table:
    """Every round on a line; rounds are numbered as in the page, the prompt's pass is 0."""
    table = Table(title="rounds", title_justify="left", box=None, pad_edge=False)
    table.add_column("#", justify="right")
    table.add_column(f"{OPEN}accepted{CLOSE} [rejected] not considered", ratio=1)
    table.add_column("target's own")
    for name in ("p target", "p drafter", "rank", "bits target", "bits drafter"):
        table.add_column(name, justify="right")
    table.add_column("cause")
    for index, one in enumerate(explanation.rounds):
        own = one.token_ids[one.num_kept :]
        table.add_row(
            str(index),
            _block(one, explanation.labels),
            Text(" ".join(visible(explanation.labels[token_id]) for token_id in own)),
            *_rejection_cells(one.rejection),
        )
    return table


def _block(one: Round, labels: dict[int, str]) -> Text:
    text = Text("prompt", style=UNSEEN) if one.is_prompt else Text()
    for slot, token_id in enumerate(one.drafted_ids):
        label = visible(labels[token_id])
        if slot < one.num_kept:
            text.append(OPEN + label + CLOSE, style=DRAFTED)
        elif one.rejection is not None and slot == one.rejection.slot:
            text.append(f"[{label}]", style=REJECTED)
        else:
            text.append(f" {label}", style=UNSEEN)
    return text


def _rejection_cells(rejection: Rejection | None) -> list[str]:
    if rejection is None:
        return [""] * 6
    evidence, label = rejection.evidence, CAUSE_LABELS[rejection.cause]
    if evidence is None:
        return [*[""] * 5, label]
    return [
        f"{evidence.target_probability:.3f}",
        _number(evidence.drafter_probability, ".3f"),
        _number(evidence.drafter_rank, "d"),
        f"{evidence.target_entropy:.2f}",
        _number(evidence.drafter_entropy, ".2f"),
        label,
    ]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_line(sums: Sums) -> str:
    """The most important counts."""
    if not sums.num_rounds:
        return "0 rounds: no token came after the prefill's"
    beside = f" and {sums.num_beside} beside them" if sums.num_beside else ""
    return (
        f"{counted(sums.num_rounds, 'round')}, tau {sums.acceptance_length:.2f}, "
        f"{sums.num_drafted} drafted{beside}, {sums.total.num_kept} accepted, "
        f"{counted(sums.total.num_rejected, 'rejection')}"
    )


def sums_tables(sums: Sums) -> list[Table]:
    """Causes by kind of text, and by position in the block; none where nothing was tested."""
    if not sums.total.num_tested:
        return []
    by_kind = [(kind, sums.by_kind[kind]) for kind in KINDS if kind in sums.by_kind]
    by_slot = [(f"slot {slot + 1}", tally) for slot, tally in enumerate(sums.by_slot)]
    return [
        _tallies("by kind of text", [*by_kind, ("all", sums.total)], sums.total),
        _tallies("by position in the block", by_slot, sums.total),
    ]


def _tallies(title: str, rows: Iterable[tuple[str, Tally]], total: Tally) -> Table:
    causes = [cause for cause in CAUSES if total.causes[cause]]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("tested", "accepted", "rate", "rejected", *(CAUSE_LABELS[c] for c in causes)):
        table.add_column(name, justify="right")
    for name, tally in rows:
        table.add_row(
            name,
            str(tally.num_tested),
            str(tally.num_kept),
            f"{tally.acceptance_rate:.0%}",
            str(tally.num_rejected),
            *(str(tally.causes[cause] or "") for cause in causes),
        )
    return table


def streams_table(streams: Streams, longest_run: int, stall_limit: float | None) -> Table:
    """Gaps, bursts and stalls, drafted beside plain."""
    table = Table(title="streaming", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("drafted", justify="right")
    table.add_column("plain", justify="right")
    both = (streams.drafted, streams.plain)
    table.add_row("tokens per second", *(f"{line.tokens_per_second:.1f}" for line in both))
    for name, share in (("median", 0.5), ("95th", 0.95), ("99th", 0.99), ("largest", 1.0)):
        table.add_row(f"gap, {name}", *(f"{1e3 * line.quantile(share):.1f} ms" for line in both))
    table.add_row("bursts by number of tokens", *(_sizes(line) for line in both))
    table.add_row("stalls", *(_stalls(line, stall_limit) for line in both))
    table.add_row("longest run of rejected blocks", str(longest_run), "")
    return table


def _sizes(line: Timeline) -> str:
    return " ".join(f"{size}:{count}" for size, count in line.burst_sizes.items())


def _stalls(line: Timeline, limit: float | None) -> str:
    stalls = line.stalls(limit)
    causes = sorted({stall.cause for stall in stalls})
    named = ", ".join(f"{sum(s.cause == cause for s in stalls)} {cause}" for cause in causes)
    return f"{len(stalls)} ({named})" if stalls else "0"


def groups_table(groups: Sequence[Group]) -> Table:
    """Categories of prompts, the one that loses most first."""
    table = Table(title="by kind of prompt", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for name in ("prompts", "tau", "tau against all", "rate", "over plain, low-high"):
        table.add_column(name, justify="right")
    table.add_column("commonest causes")
    for group in groups:
        total = group.sums.total
        causes = [
            f"{CAUSE_LABELS[cause]} {count / total.num_rejected:.0%}"
            for cause, count in total.causes.most_common(2)
        ]
        table.add_row(
            group.category,
            str(group.num_prompts),
            f"{group.sums.acceptance_length:.2f}",
            f"{-group.behind:+.2f}",
            f"{total.acceptance_rate:.0%}",
            _speedup_cell(group),
            ", ".join(causes),
        )
    return table


def _speedup_cell(group: Group) -> str:
    if group.speedup is None or group.speedup_ends is None:
        return "-"
    low, high = group.speedup_ends
    return f"{group.speedup:.2f}x, {low:.2f}-{high:.2f}"


def example_lines(groups: Sequence[Group]) -> list[Text]:
    """Rejections in their places: text before them, what was drafted, what came instead."""
    lines = []
    for group in groups:
        for example in group.examples:
            line = Text(f"{group.category}, {example.id}: …{visible(example.context)}")
            line.append(f"[{visible(example.drafted)}]", style=REJECTED)
            if example.wanted is not None:
                line.append(f" instead: {visible(example.wanted)}")
            line.append(f" ({CAUSE_LABELS[example.cause]})", style=UNSEEN)
            lines.append(line)
    return lines
