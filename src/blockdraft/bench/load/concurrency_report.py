"""`bench concurrency` and `bench never-slower`, for people and for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blockdraft.bench.config import ConcurrencyConfig, NeverSlowerConfig
from blockdraft.bench.decode import ADAPTIVE, Run
from blockdraft.bench.ledger.accounts import describe_accounts
from blockdraft.bench.load.concurrency import (
    CONCURRENCY_DEFINITIONS,
    KeepingUp,
    PointFigures,
    PointRun,
    accounts_of,
    keeping_up,
    point_figures,
)
from blockdraft.bench.load.never_slower import (
    NEVER_SLOWER_DEFINITIONS,
    Pair,
    PairFigures,
    pair_figures,
)
from blockdraft.bench.result import describe_result
from blockdraft.bench.speed.report import describe_output
from blockdraft.bench.tables import empty_table, spread_cells, tau_words, three_digits
from blockdraft.llm import LLM

CONCURRENCY_LEGEND = """\
requests: how many run concurrently. tok/s: output tokens of all requests per
second of wall time. per user: median request, after its first token. over
plain: in the same repeat. Medians and low-high over the repeats. decoding:
requests past their first token, on average. tau: tokens per target pass. depth:
longest drafted path of a target pass, on average. same: outputs that equal
those of the first plain run of the same requests."""

NEVER_SLOWER_LEGEND = """\
requests: how many run concurrently. ratio: tokens per second with adaptive
drafting divided by those of an engine without a drafter, for each pair; below 1
is slower. Allowed: 1.03 times the time, plus a second in which drafting learns.
Medians and low-high over the pairs. confidence: the probability that low-high
contains the true median, if pairs are independent. tau: tokens per target pass.
depth: longest drafted path of a target pass, on average. same: outputs of both
sides that equal the first ones without a drafter."""


def concurrency_json(
    llm: LLM, config: ConcurrencyConfig, runs: Sequence[PointRun], num_resumed: int = 0
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result."""
    report: dict[str, Any] = {
        **describe_result("concurrency", llm, CONCURRENCY_DEFINITIONS, num_resumed),
        "bench": asdict(config) | {"num_requests": config.requests_per_point},
        "figures": [asdict(row) for row in point_figures(runs)],
        "keeping_up": [asdict(row) | {"keeps_up": row.keeps_up} for row in keeping_up(runs)],
        "runs": [
            {
                "concurrency": measured.concurrency,
                "way": asdict(measured.way),
                "num_identical": measured.num_identical,
                "prompts": measured.prompts,
                **_run(measured.run),
            }
            for measured in runs
        ],
    }
    if config.ledger:
        report["ledger"] = describe_accounts(accounts_of(llm, runs))
    return report


def never_slower_json(
    llm: LLM, config: NeverSlowerConfig, pairs: Sequence[Pair], num_resumed: int = 0
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result."""
    return {
        **describe_result("never-slower", llm, NEVER_SLOWER_DEFINITIONS, num_resumed),
        "bench": asdict(config) | {"num_requests": config.requests_per_point},
        "figures": [asdict(row) for row in pair_figures(pairs)],
        "pairs": [
            {
                "concurrency": pair.concurrency,
                "ratio": pair.ratio,
                "num_identical": pair.num_identical,
                "adaptive": _run(pair.adaptive),
                "no_drafter": _run(pair.no_drafter),
            }
            for pair in pairs
        ],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "wall_seconds": run.wall_seconds,
        "num_tokens": run.num_tokens,
        "tokens_per_second": run.tokens_per_second,
        "requests": [describe_output(sample) for sample in run.samples],
    }


def concurrency_table(title: str, rows: Sequence[PointFigures]) -> Table:
    """One row per point and configuration; fits 80 columns."""
    headings = ("re-\nquests", "", "tok/s", "low-high", "per\nuser", "over\nplain", "low-high")
    view = empty_table(title, *headings, "deco-\nding", "tau", "depth", "same")
    for index, row in enumerate(rows):
        is_first = index == 0 or rows[index - 1].concurrency != row.concurrency
        if is_first:
            view.add_section()
        view.add_row(
            str(row.concurrency) if is_first else "",
            row.way,
            *spread_cells(row.tokens_per_second),
            three_digits(row.tokens_per_second_per_user.median),
            *spread_cells(row.speedup_over_plain),
            f"{row.mean_decoding:.1f}",
            tau_words(row.acceptance_length),
            f"{row.mean_depth:.1f}",
            f"{row.num_identical}/{row.num_outputs}",
        )
    return view


def depth_lines(rows: Sequence[PointFigures | PairFigures]) -> list[str]:
    """How often each depth was used, one line for each point with adaptive drafting."""
    return [
        f"adaptive, concurrency {row.concurrency}, longest path: {_shares(row.num_passes_of_depth)}"
        for row in rows
        if isinstance(row, PairFigures) or row.way == ADAPTIVE.name
    ]


def keeping_up_lines(rows: Sequence[KeepingUp]) -> list[str]:
    """How adaptive drafting does against the best other configuration, one line for each point."""
    return [
        f"adaptive, concurrency {row.concurrency}: {row.over_best.median:.2f} times {row.best}, "
        f"{row.over_best.low:.2f}-{row.over_best.high:.2f}"
        + ("" if row.keeps_up else ": MORE THAN 3 % SLOWER")
        for row in rows
    ]


def holding_lines(rows: Sequence[PairFigures]) -> list[str]:
    """Whether drafting is never slower, one line for each point."""
    return [
        f"concurrency {row.concurrency}: {row.slowdown:.3f} times the time without a drafter, "
        f"{row.limit:.3f} allowed" + ("" if row.holds else ": SLOWER")
        for row in rows
    ]


def _shares(counts: Mapping[int, int]) -> str:
    """The most frequent ones that fit a line."""
    total = sum(counts.values())
    often = sorted(counts, key=lambda depth: -counts[depth])[:5]
    shown = ", ".join(f"{depth} in {counts[depth] / total:.0%}" for depth in sorted(often))
    return f"{shown} of the passes" if total else "no pass"


def never_slower_table(title: str, rows: Sequence[PairFigures]) -> Table:
    """One row per point; fits 80 columns."""
    headings = ("re-\nquests", "adaptive\ntok/s", "no drafter\ntok/s", "ratio", "low-high")
    view = empty_table(title, *headings, "confi-\ndence", "tau", "depth", "same")
    for row in rows:
        view.add_row(
            str(row.concurrency),
            three_digits(row.adaptive_tokens_per_second.median),
            three_digits(row.no_drafter_tokens_per_second.median),
            f"{row.ratio.median:.3f}",
            f"{row.ratio.low:.3f}-{row.ratio.high:.3f}",
            f"{row.confidence:.0%}",
            tau_words(row.acceptance_length),
            f"{row.mean_depth:.1f}",
            f"{row.num_identical}/{row.num_outputs}",
        )
    return view
