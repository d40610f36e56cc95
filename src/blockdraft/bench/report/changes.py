"""Two runs of the same measurement, side by side. Loads no model library."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from blockdraft.bench.report.section import Grid, Section
from blockdraft.bench.result import Result, damage_refused, machines_of, need
from blockdraft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Figure:
    """One measure of a result, and the ends of its spread, if it has one."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.low:.4g}-{self.high:.4g})"


_OPTIONS = ("bench", "config_of_requests", "settings", "goal", "traffic")
"""Where results of several kinds have the options of their measurement; others have runs."""
_REPEATS = ("repeats", "pairs", "passages")
"""Options that say how often a figure was measured. What was measured once has no spread."""


def change_section(results: Sequence[Result], earlier: Sequence[Result]) -> Section:
    """What changed in each result since the earlier one of its name, or the only one of its kind.

    Raises:
        ConfigError: no result has an earlier one.
    """
    grids, facts = [], []
    for result in results:
        before = _earlier(result, earlier)
        if before is None:
            facts.append(f"{result.name}: no earlier result to compare it with.")
            continue
        if len(machines := machines_of([result, before])) > 1:
            facts.append(
                f"{result.name}: MIXED MACHINES, {' and '.join(machines)}; speeds cannot be "
                "compared, tau can."
            )
        if result.values.get("config") != before.values.get("config"):
            facts.append(f"{result.name}: the models or their options differ.")
        if other := _other_options(result, before):
            facts.append(f"{result.name}: MEASURED WITH OTHER OPTIONS: {', '.join(other)}.")
        grids.append(
            Grid(
                result.name,
                f"{before.path}, then {result.path}.",
                ["figure", "earlier", "now", "change", "spreads"],
                list(_rows(figures_of(before), figures_of(result))),
            )
        )
    if not grids:
        raise ConfigError(
            "no result has an earlier one of its kind in --against; give results of the same "
            "commands"
        )
    return Section("What changed", facts, grids)


def _other_options(result: Result, before: Result) -> list[str]:
    """The options of the measurement that are not the same, of those that both results have."""
    now, then = _options(result), _options(before)
    return sorted(name for name in now.keys() & then.keys() if now[name] != then[name])


def _options(result: Result) -> dict[str, list[Any]]:
    """Each with its values, of which several runs may have several; not where the result lies."""
    values, found = result.values, dict[str, list[Any]]()
    with damage_refused(result):
        runs = values.get("runs")
        configs = [values.get(name) for name in _OPTIONS]
        configs += [run.get("config") for run in runs] if isinstance(runs, list) else []
        for config in configs:
            for name, value in (config or {}).items():
                if name != "output" and value not in found.setdefault(name, []):
                    found[name].append(value)
    return found


def _earlier(result: Result, earlier: Sequence[Result]) -> Result | None:
    same_kind = [one for one in earlier if one.kind == result.kind]
    named = [one for one in same_kind if one.name == result.name]
    found = named or (same_kind if len(same_kind) == 1 else [])
    return found[0] if found else None


def _rows(earlier: Sequence[Figure], now: Sequence[Figure]) -> Iterator[list[str]]:
    by_name = {figure.name: figure for figure in earlier}
    for figure in now:
        before = by_name.pop(figure.name, None)
        if before is None:
            yield [figure.name, "not measured", str(figure), "", ""]
            continue
        change = f"{figure.value / before.value - 1:+.1%}" if before.value else ""
        if figure.value == before.value:
            change = "equal"
        yield [figure.name, str(before), str(figure), change, _overlap(before, figure)]
    for figure in by_name.values():
        yield [figure.name, str(figure), "not measured", "", ""]


def _overlap(one: Figure, other: Figure) -> str:
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return ""
    return "overlap" if one.low <= other.high and other.low <= one.high else "APART"


def figures_of(result: Result) -> list[Figure]:
    """The figures by which two runs are compared.

    Raises:
        ConfigError: the result lacks them.
    """
    with damage_refused(result):
        figures = list(_FIGURES[result.kind](result))
        for figure in figures:
            str(figure)  # a value of another type is refused here, where its file is known
    if any(1 in _options(result).get(name, ()) for name in _REPEATS):
        figures = [replace(f, low=None, high=None) if f.low == f.high else f for f in figures]
    return figures


def _of_summary(result: Result) -> Iterator[Figure]:
    for run in need(result, "runs").values():
        for row in [*run["rows"], run["all"]]:
            for kind in ("greedy", "sampled"):
                for name in ("tau", "speedup"):
                    yield Figure(f"{row['name']}, {kind}: {name}", row[kind][name])


def _of_speed(result: Result) -> Iterator[Figure]:
    fixed = "break_even_length" in result.values
    for run in need(result, "runs"):
        for group, row in run["figures"].items():
            length = f", {run['config']['max_tokens']} tokens" if fixed else ""
            name = f"{group}, T={run['config']['temperature']:g}{length}"
            yield Figure(f"{name}: tau", row["ways"]["drafted"]["tau_micro"])
            yield Figure(f"{name}: plain tok/s", row["plain"]["tokens_per_second"])
            yield Figure(f"{name}: drafted tok/s", row["drafted"]["tokens_per_second"])
            yield from _spread(f"{name}: speed-up", row["speedup_bands"]["plain"])


def _of_ways(result: Result) -> Iterator[Figure]:
    for way, by_group in need(result, "figures").items():
        for group, row in by_group.items():
            yield Figure(f"{way}, {group}: tau", row["ways"]["drafted"]["tau_micro"])
            yield from _spread(f"{way}, {group}: speed-up", row["speedup_bands"]["plain"])


def _of_concurrency(result: Result) -> Iterator[Figure]:
    for row in need(result, "figures"):
        name = f"{row['way']}, concurrency {row['concurrency']}"
        yield from _spread(f"{name}: total tok/s", row["tokens_per_second"])
        yield from _spread(f"{name}: speed-up", row["speedup_over_plain"])


def _of_pareto(result: Result) -> Iterator[Figure]:
    for row in need(result, "points"):
        name = f"{row['way']}, concurrency {row['concurrency']}"
        yield Figure(f"{name}: tau", row["measures"]["tau_micro"])
        yield from _spread(f"{name}: total tok/s", row["throughput"])
        yield from _spread(f"{name}: tok/s per user", row["interactivity"])
        yield from _spread(f"{name}: speed-up", row["speedup_over_plain"])


def _of_never_slower(result: Result) -> Iterator[Figure]:
    for row in need(result, "figures"):
        yield from _spread(f"concurrency {row['concurrency']}: over no drafter", row["ratio"])


def _of_context(result: Result) -> Iterator[Figure]:
    for row in need(result, "figures"):
        # The lengths of prompts are equal where several did not fit.
        name = f"{row['requested_len']} tokens"
        yield Figure(f"{name}: tau", row["acceptance_length"])
        yield from _spread(f"{name}: decode speed-up", row["decode_speedup"])


def _of_traffic(result: Result) -> Iterator[Figure]:
    for row in need(result, "figures"):
        yield from _spread(f"{row['way']}: total tok/s", row["tokens_per_second_in_total"])
        if (found := row["measures"]) is not None:
            yield Figure(f"{row['way']}: tau", found["tau_micro"])
            yield from _spread(f"{row['way']}: decode speed-up", found["decode_speedup"])


def _of_break_even(result: Result) -> Iterator[Figure]:
    yield Figure("break-even tau", need(result, "break_even", "step_ratio"))


def _of_plan(result: Result) -> Iterator[Figure]:
    for row in need(result, "rows"):
        if row["replicas"] is not None:
            yield Figure(f"{row['way']}: replicas", row["replicas"])


_FIGURES: Mapping[str, Callable[[Result], Iterator[Figure]]] = {
    "summary": _of_summary,
    "speed": _of_speed,
    "ways": _of_ways,
    "concurrency": _of_concurrency,
    "pareto": _of_pareto,
    "never-slower": _of_never_slower,
    "context": _of_context,
    "traffic": _of_traffic,
    "break-even": _of_break_even,
    "plan": _of_plan,
}


def _spread(name: str, spread: Mapping[str, Any] | None) -> Iterator[Figure]:
    """Of a spread or a speed-up with its band; nothing where there is none."""
    if spread is not None:
        middle = spread["median"] if "median" in spread else spread["value"]
        yield Figure(name, middle, spread["low"], spread["high"])
