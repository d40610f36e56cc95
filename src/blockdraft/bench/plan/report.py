"""`bench plan`: what a measured curve, traffic and a price come to. Loads no model library."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from blockdraft.bench.load.curve import no_faster_from
from blockdraft.bench.plan.queueing import (
    Goal,
    Load,
    Service,
    ServicePoint,
    load_of,
    num_replicas,
    with_switch,
)
from blockdraft.bench.plan.simulation import NUM_REQUESTS, Arrival, poisson_arrivals, simulated_load
from blockdraft.bench.result import VERSION, Result, need
from blockdraft.bench.tables import empty_table, three_digits
from blockdraft.core.errors import ConfigError
from blockdraft.core.jsonl import bad_row, read_all
from blockdraft.measure.provenance import describe_environment

PLAIN = "plain"
MOST_ADDED = 50
"""Replicas that are added at most until the simulation meets the goal too."""

PLAN_DEFINITIONS = {
    "replicas": "the fewest with which the queueing formula and the simulation both meet the goal",
    "replicas_by_formula": "the fewest with which the formula does: Poisson arrivals, evenly "
    "shared; see docs/benchmarks.md",
    "formula, simulation": "one replica with that many in all; times are the goal's percentile",
    "off_from": "requests at once from which on plain decoding was at least as fast at every "
    "measured point; drafting should be off there. None: it never was",
    "cost_per_hour": "replicas times the price of a machine for an hour",
    "cost_per_million_tokens": "of output, at this traffic",
}

PLAN_LEGEND = """\
replicas: the fewest that meet the goal by a queueing formula, and in brackets
by the formula alone; a simulation of arrivals confirmed them. busy: requests
over the most that they could complete. TTFT, TPOT: percentiles in milliseconds,
by the formula and as simulated. Measured speeds are medians, on the machine of
the curve; prompts were as long as there."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests per second, mean lengths in tokens, and the requests as they are played.

    is_drawn: they are drawn, so there are as many as are wanted; others are a record.
    """

    requests_per_second: float
    output_len: float
    prompt_len: float | None
    arrivals: tuple[Arrival, ...]
    source: str
    is_drawn: bool


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One way to decode; see PLAN_DEFINITIONS. `replicas` is None if no number meets the goal."""

    way: str
    replicas: int | None
    replicas_by_formula: int | None
    formula: Load | None
    simulation: Load | None
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    off_from: int | None


def steady_traffic(rate: float, output_len: float, prompt_len: float | None) -> Traffic:
    """Independent requests.

    Raises:
        ConfigError: a number is out of its range.
    """
    for name, value, least in (
        ("requests_per_second", rate, 0.0),
        ("prompt_tokens", prompt_len, 0.0),
    ):
        if value is not None and not (value > least and isfinite(value)):
            raise ConfigError(f"{name} is {value:g}; give a number above 0")
    if not (output_len >= 1 and isfinite(output_len)):
        raise ConfigError(f"output_tokens is {output_len:g}; give a number of at least 1")
    arrivals = tuple(poisson_arrivals(rate, output_len, NUM_REQUESTS))
    source = "independent, exponential lengths"
    return Traffic(rate, output_len, prompt_len, arrivals, source, is_drawn=True)


def read_traffic(path: Path, prompt_len: float | None) -> Traffic:
    """From JSONL: rows with `at`, in seconds, and `output_tokens`.

    Raises:
        ConfigError: the file cannot be read, a row lacks one, or it holds no second of traffic.
    """

    def read_row(row: dict[str, Any], number: int) -> Arrival:
        at: Any = row.get("at")
        tokens = row.get("output_tokens")
        if not _is_number(at) or at < 0:
            raise bad_row(path, number, f"at is {at!r}", "give seconds from 0, such as 12.5")
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            remedy = "give a whole number of at least 1"
            raise bad_row(path, number, f"output_tokens is {tokens!r}", remedy)
        return Arrival(float(at), tokens)

    arrivals = sorted(read_all(path, read_row), key=lambda arrival: arrival.at)
    span = arrivals[-1].at - arrivals[0].at
    if span <= 0:
        raise ConfigError(f"{path} has all its requests at one moment; give a longer record")
    rate = (len(arrivals) - 1) / span
    mean = fmean(arrival.output_len for arrival in arrivals)
    return Traffic(rate, mean, prompt_len, tuple(arrivals), str(path), is_drawn=False)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def services_of(result: Result, prompt_len: float | None = None) -> dict[str, Service]:
    """Each way of a curve; prompts of another length take as much longer.

    Raises:
        ConfigError: it is no result of `bench pareto`, or it lacks plain decoding, the baseline.
    """
    if result.kind != "pareto":
        raise ConfigError(
            f"{result.path} is a result {result.kind!r}; give one that bench pareto wrote"
        )
    scale = 1.0 if prompt_len is None else prompt_len / need(result, "mean_prompt_tokens")
    points: dict[str, dict[float, ServicePoint]] = {}
    for point in need(result, "points"):
        try:
            measures = point["measures"]
            if measures["seconds_per_token"] is None:
                raise ConfigError(
                    f"{result.path} has outputs of single tokens, which give no speed; measure "
                    "with a larger --max-tokens"
                )
            service = ServicePoint(
                num_running=point["mean_running"],
                prompt_seconds=scale * measures["prompt_seconds"]["mean"],
                token_seconds=1 / measures["decode_tokens_per_second"],
            )
            points.setdefault(point["way"], {})[service.num_running] = service
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(
                f"{result.path} has a damaged point ({error!r}); measure again"
            ) from error
    if PLAIN not in points:
        raise ConfigError(
            f"{result.path} lacks the baseline, plain decoding; measure with bench pareto"
        )
    return {
        way: Service(tuple(by_load[n] for n in sorted(by_load))) for way, by_load in points.items()
    }


def mean_output(result: Result) -> float:
    """Tokens of an output of plain decoding, as the curve was measured."""
    return float(need(result, "mean_output_tokens"))


def goal_words(goal: Goal) -> str:
    """The limits of a goal."""
    limits = [
        f"{name} {1000 * limit:g} ms"
        for name, limit in (("TTFT", goal.first_token_seconds), ("TPOT", goal.token_seconds))
        if limit is not None
    ]
    return f"{goal.percentile:g} % within {', '.join(limits)}"


def off_from(result: Result, way: str) -> int | None:
    """Requests at once from which on a way was nowhere faster than plain decoding, by medians."""
    return no_faster_from(
        {
            point["concurrency"]: point["speedup_over_plain"]["median"]
            for point in need(result, "points")
            if point["way"] == way
        }
    )


def make_plan(result: Result, traffic: Traffic, goal: Goal, price: float | None) -> list[PlanRow]:
    """A row for each way, and for each that is off under load; plain decoding first."""
    services = services_of(result, traffic.prompt_len)
    plain = services[PLAIN]
    rows = [_row(PLAIN, plain, traffic, goal, price, None)]
    for way, service in services.items():
        if way == PLAIN:
            continue
        limit = off_from(result, way)
        rows.append(_row(way, service, traffic, goal, price, limit))
        concurrencies = {p["concurrency"] for p in need(result, "points") if p["way"] == way}
        if limit is not None and limit > min(concurrencies):
            switched = with_switch(service, plain, _num_running(result, limit))
            name = f"{way}, off from {limit} at once"
            rows.append(_row(name, switched, traffic, goal, price, limit))
    return rows


def _num_running(result: Result, concurrency: int) -> float:
    """At that point of plain decoding."""
    return float(
        next(
            point["mean_running"]
            for point in need(result, "points")
            if (point["way"], point["concurrency"]) == (PLAIN, concurrency)
        )
    )


def _row(
    way: str, service: Service, traffic: Traffic, goal: Goal, price: float | None, limit: int | None
) -> PlanRow:
    rate, output_len = traffic.requests_per_second, traffic.output_len
    by_formula = num_replicas(service, rate, output_len, goal)
    if by_formula is None:
        return PlanRow(way, None, None, None, None, None, None, limit)
    for count in range(by_formula, by_formula + MOST_ADDED + 1):
        played = simulated_load(service, _for_replicas(traffic, count), count, goal)
        if goal.is_met(played):
            break
    else:
        return PlanRow(way, None, by_formula, None, played, None, None, limit)
    cost = None if price is None else price * count
    return PlanRow(
        way=way,
        replicas=count,
        replicas_by_formula=by_formula,
        formula=load_of(service, rate / count, output_len, goal.percentile),
        simulation=played,
        cost_per_hour=cost,
        cost_per_million_tokens=None if cost is None else 1e6 * cost / (3600 * rate * output_len),
        off_from=limit,
    )


def _for_replicas(traffic: Traffic, count: int) -> Sequence[Arrival]:
    """Drawn arrivals are as many as show percentiles on every replica; a record is what it is."""
    wanted = 200 * count
    if wanted <= len(traffic.arrivals) or not traffic.is_drawn:
        return traffic.arrivals
    return poisson_arrivals(traffic.requests_per_second, traffic.output_len, wanted)


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
    """One row for each way; fits 80 columns."""
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


def switch_lines(result: Result, rows: Sequence[PlanRow]) -> list[str]:
    """Where each way should be off, by what was measured of it; with baseline and spread."""
    lines = []
    for way in dict.fromkeys(p["way"] for p in need(result, "points") if p["way"] != PLAIN):
        limit = next(row.off_from for row in rows if row.way == way)
        if limit is None:
            lines.append(f"{way}: leave it on; it was faster than plain at the largest load")
            continue
        over = next(
            point["speedup_over_plain"]
            for point in need(result, "points")
            if (point["way"], point["concurrency"]) == (way, limit)
        )
        lines.append(
            f"{way}: turn it off from {limit} at once on, where it gives "
            f"{over['median']:.2f} times plain in total ({over['low']:.2f}-{over['high']:.2f} over "
            "the repeats)"
        )
    return lines
