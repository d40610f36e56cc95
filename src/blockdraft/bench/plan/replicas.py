"""The replicas that traffic needs, for each measured configuration. Loads no model library."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.bench.load.curve import no_faster_from
from blockdraft.bench.plan.queueing import (
    Goal,
    Load,
    Service,
    ServicePoint,
    drafting_below,
    load_of,
    num_replicas,
)
from blockdraft.bench.plan.simulation import Arrival, poisson_arrivals, simulated_load
from blockdraft.bench.plan.traffic import Traffic
from blockdraft.bench.result import Result, damage_refused, need
from blockdraft.core.errors import ConfigError

PLAIN = "plain"
MOST_ADDED = 50
"""Replicas that are added at most until the simulation meets the goal too."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One configuration; see PLAN_DEFINITIONS. `replicas` is None if no number meets the goal."""

    way: str
    replicas: int | None
    replicas_by_formula: int | None
    formula: Load | None
    simulation: Load | None
    cost_per_hour: float | None
    cost_per_million_tokens: float | None
    off_from: int | None


def services_of(result: Result, prompt_len: float | None = None) -> dict[str, Service]:
    """Each configuration of a curve; prompts of another length take as much longer.

    Raises:
        ConfigError: it is no result of `bench pareto`, or it lacks plain decoding, the baseline.
    """
    if result.kind != "pareto":
        raise ConfigError(
            f"{result.path} is a {result.kind!r} result; give one that bench pareto wrote"
        )
    points: dict[str, dict[float, ServicePoint]] = {}
    with damage_refused(result):
        scale = 1.0 if prompt_len is None else prompt_len / need(result, "mean_prompt_tokens")
        for point in need(result, "points"):
            measures = point["measures"]
            if measures["seconds_per_token"] is None:
                raise ConfigError(
                    f"{result.path} has outputs of single tokens, from which no speed follows; "
                    "measure with a larger --max-tokens"
                )
            service = ServicePoint(
                num_running=float(point["mean_running"]),
                prompt_seconds=scale * measures["prompt_seconds"]["mean"],
                token_seconds=1 / measures["decode_tokens_per_second"],
            )
            points.setdefault(point["way"], {})[service.num_running] = service
    if PLAIN not in points:
        raise ConfigError(
            f"{result.path} lacks the baseline, plain decoding; measure with bench pareto"
        )
    return {
        way: Service(tuple(by_load[n] for n in sorted(by_load))) for way, by_load in points.items()
    }


def mean_output(result: Result) -> float:
    """Tokens of an output of plain decoding, as the curve was measured."""
    with damage_refused(result):
        return float(need(result, "mean_output_tokens"))


def points_of(result: Result, way: str) -> dict[int, Mapping[str, Any]]:
    """The measured points of a configuration, by concurrency."""
    with damage_refused(result):
        points = need(result, "points")
        return {point["concurrency"]: point for point in points if point["way"] == way}


def off_from(result: Result, way: str) -> int | None:
    """The concurrency from which on one was nowhere faster than plain decoding, by medians."""
    points = points_of(result, way)
    with damage_refused(result):
        return no_faster_from({n: one["speedup_over_plain"]["median"] for n, one in points.items()})


def make_plan(result: Result, traffic: Traffic, goal: Goal, price: float | None) -> list[PlanRow]:
    """A row for each configuration, and for each that is off under load; plain decoding first."""
    services = services_of(result, traffic.prompt_len)
    plain = services[PLAIN]
    rows = [_row(PLAIN, plain, traffic, goal, price, None)]
    for way, service in services.items():
        if way == PLAIN:
            continue
        limit = off_from(result, way)
        rows.append(_row(way, service, traffic, goal, price, limit))
        if limit is not None and limit > min(points_of(result, way)):
            num_running = float(points_of(result, PLAIN)[limit]["mean_running"])
            both = drafting_below(num_running, service, plain)
            name = f"{way}, off from concurrency {limit}"
            rows.append(_row(name, both, traffic, goal, price, limit))
    return rows


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
