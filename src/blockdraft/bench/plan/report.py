"""`bench plan`, for people and for machines. Loads no model library."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blockdraft.bench.plan.queueing import Goal
from blockdraft.bench.plan.replicas import PLAIN, PlanRow, points_of
from blockdraft.bench.plan.traffic import Traffic
from blockdraft.bench.result import VERSION, Result, need
from blockdraft.bench.tables import empty_table, three_digits
from blockdraft.measure.provenance import describe_environment

PLAN_DEFINITIONS = {
    "replicas": "the fewest with which the queueing formula and the simulation both meet the goal",
    "replicas_by_formula": "the fewest with which the formula does: Poisson arrivals, evenly "
    "shared; see docs/measure.md",
    "formula, simulation": "one replica of that many; times are the goal's percentile",
    "off_from": "concurrent requests from which on plain decoding was at least as fast at every "
    "measured point; turn drafting off there. None: it never was",
    "cost_per_hour": "replicas times the price of a machine for an hour",
    "cost_per_million_tokens": "of output, at this traffic",
}

PLAN_LEGEND = """\
replicas: the fewest that meet the goal by a queueing formula and in a
simulation of arrivals; in parentheses, by the formula alone. busy: requests
divided by the most that the replicas could complete. TTFT, TPOT: percentiles in
milliseconds, by the formula and as simulated. Speeds are the curve's medians,
on its machine and for prompts of its lengths."""


def goal_words(goal: Goal) -> str:
    """The limits of a goal."""
    limits = [
        f"{name} {1000 * limit:g} ms"
        for name, limit in (("TTFT", goal.first_token_seconds), ("TPOT", goal.token_seconds))
        if limit is not None
    ]
    return f"{goal.percentile:g} % within {', '.join(limits)}"


def plan_json(
    result: Result, traffic: Traffic, goal: Goal, price: float | None, rows: Sequence[PlanRow]
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a plan."""
    return {
        "result": "plan",
        "result_version": VERSION,
        **describe_environment(),
        "definitions": PLAN_DEFINITIONS,
        "curve": {
            "path": str(result.path),
            "machine": result.machine,
            "git_commit": result.values.get("git_commit"),
            "date": result.values.get("date"),
        },
        "goal": asdict(goal),
        "traffic": {
            "requests_per_second": traffic.requests_per_second,
            "mean_output_tokens": traffic.output_len,
            "mean_prompt_tokens": traffic.prompt_len or need(result, "mean_prompt_tokens"),
            "arrivals": traffic.source,
        },
        "price_per_machine_hour": price,
        "rows": [asdict(row) for row in rows],
    }


def plan_table(title: str, rows: Sequence[PlanRow]) -> Table:
    """One row for each configuration; fits 80 columns."""
    view = empty_table(
        title,
        "",
        "replicas",
        "busy",
        "TTFT\nms",
        "simu-\nlated",
        "TPOT\nms",
        "simu-\nlated",
        "cost\nper hour",
        "per mil-\nlion tok.",
    )
    for row in rows:
        view.add_row(row.way, *_cells(row))
    return view


def _cells(row: PlanRow) -> list[str]:
    if row.replicas is None or row.formula is None or row.simulation is None:
        return ["never", *[""] * 7]
    times = (
        (row.formula.first_token_seconds, row.simulation.first_token_seconds),
        (row.formula.token_seconds, row.simulation.token_seconds),
    )
    return [
        f"{row.replicas} ({row.replicas_by_formula})",
        f"{row.formula.utilization:.0%}",
        *(three_digits(1000 * value) for pair in times for value in pair),
        "" if row.cost_per_hour is None else f"{row.cost_per_hour:.2f}",
        "" if row.cost_per_million_tokens is None else f"{row.cost_per_million_tokens:.2f}",
    ]


def off_lines(result: Result, rows: Sequence[PlanRow]) -> list[str]:
    """Where each should be off, by what was measured of it; with baseline and spread."""
    lines = []
    for way in dict.fromkeys(p["way"] for p in need(result, "points") if p["way"] != PLAIN):
        limit = next(row.off_from for row in rows if row.way == way)
        if limit is None:
            lines.append(f"{way}: leave it on; it was faster than plain at the largest load")
            continue
        over = points_of(result, way)[limit]["speedup_over_plain"]
        lines.append(
            f"{way}: turn it off from concurrency {limit} on, where it gives {over['median']:.2f} "
            f"times plain in total ({over['low']:.2f}-{over['high']:.2f} over the repeats)"
        )
    return lines
