"""What a report says of each kind of result: facts, tables and plots. Loads no model library."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from blockdraft.bench.report import summary, svg
from blockdraft.bench.report.published import LOADS, PUBLISHED, PUBLISHED_LOADS, SETS, set_of
from blockdraft.bench.result import Result, need
from blockdraft.bench.speed.lengths import BreakEvenLength, length_line
from blockdraft.bench.tables import three_digits
from blockdraft.core.errors import ConfigError
from blockdraft.core.words import counted

Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; `about` says what its figures are, the first cell of a row names it."""

    title: str
    about: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report. `plots`: SVG files by what stands behind the name of the result."""

    title: str
    facts: Sequence[str] = ()
    grids: Sequence[Grid] = ()
    plots: Mapping[str, str] = field(default_factory=dict)
    definitions: Mapping[str, str] = field(default_factory=dict)

    @property
    def page_plots(self) -> list[str]:
        """The same for a page, which has its own stylesheet."""
        return [svg.without_style(plot) for plot in self.plots.values()]


def section_of(result: Result) -> Section:
    """The section of a result, by its kind.

    Raises:
        ConfigError: it lacks what its kind has, such as the baseline.
    """
    try:
        made = _SECTIONS[result.kind](result)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{result.path} is a result {result.kind!r} that was cut or changed by hand "
            f"({type(error).__name__}: {error}); measure again"
        ) from error
    return Section(
        title=f"{result.name}: {made.title}",
        facts=[*_origin(result), *made.facts],
        grids=[_without_repeats(grid) for grid in made.grids],
        plots=made.plots,
        definitions=result.values.get("definitions", {}),
    )


def _origin(result: Result) -> list[str]:
    """Command, machine, versions and commit, as far as a result says them."""
    values = result.values
    facts = [f"Machine: {result.machine}."]
    command = values.get("command")
    if isinstance(command, list):
        facts.append(f"Command: {' '.join(map(str, command))}")
    about = [f"{key} {values[key]}" for key in ("date", "git_commit") if values.get(key)]
    versions = values.get("versions", {})
    about += [f"{name} {version}" for name, version in versions.items() if version]
    config = values.get("config", {})
    about += [f"{key} {config[key]}" for key in ("target", "drafter", "dtype") if config.get(key)]
    memory = values.get("memory", {}).get("most_process_bytes")
    if memory:
        about.append(f"at most {memory / 2**30:.2f} GiB held")
    return [*facts, ", ".join(about)]


_NO_SPREAD = " (one prompt, no spread)"
ONE_PROMPT = "A speed-up or rate without a band comes from one prompt."


def _without_repeats(grid: Grid, mark: str = "", told: str = ONE_PROMPT) -> Grid:
    """The same with the words for a missing band once, above the table, and `mark` in the cells."""
    rows = [[cell.replace(_NO_SPREAD, mark) for cell in row] for row in grid.rows]
    return grid if rows == grid.rows else replace(grid, about=f"{grid.about} {told}", rows=rows)


def spread_words(spread: Values | None) -> str:
    """A median or value, and in brackets the ends."""
    if spread is None:
        return ""
    middle = spread["median"] if "median" in spread else spread["value"]
    if spread["low"] is None:
        return f"{three_digits(middle)}{_NO_SPREAD}"
    ends = f"{three_digits(spread['low'])}-{three_digits(spread['high'])}"
    return f"{three_digits(middle)} ({ends})"


def _summary(result: Result) -> Section:
    values = result.values
    rows = []
    for run in need(result, "runs").values():
        for row in summary.all_rows(run):
            straight, heat = row["without_loops"], f"{run['sampled_temperature']:g}"
            rows.append(
                [
                    f"{row['name']} ({row['num_prompts']})",
                    *summary.cells(row["greedy"]),
                    *summary.cells(straight),
                    heat,
                    *summary.cells(row["sampled"]),
                ]
            )
    heads = ["prompts", "greedy: tau", "speed-up", "without loops: tau", "speed-up"]
    heads += ["temperature", "sampled: tau", "speed-up"]
    about = (
        f"Speed-up over {values['baseline']}; in brackets the band in which 95 % of resamples of "
        "the prompts fall."
    )
    return Section(
        title=str(values["about"]),
        facts=[summary.same_tokens(values).strip()],
        grids=[Grid("", about, heads, rows)],
        plots={"": summary.plot(values)},
    )


def _speed(result: Result) -> Section:
    grids, plots = [], {}
    for number, run in enumerate(need(result, "runs")):
        config, figures = run["config"], run["figures"]
        rows, bars = [], []
        for name, row in figures.items():
            if "plain" not in row or row.get("ways", {}).get("drafted") is None:
                raise ConfigError(
                    f"{result.path} lacks the baseline, plain decoding, for {name}; measure again"
                )
            bands, drafted = row["speedup_bands"], row["ways"]["drafted"]
            over_stock = bands.get("transformers")
            rows.append(
                [
                    f"{name} ({row['num_prompts']})",
                    f"{drafted['tau_micro']:.2f}",
                    f"{drafted['tau_macro']:.2f}",
                    three_digits(row["plain"]["tokens_per_second"]),
                    three_digits(row["drafted"]["tokens_per_second"]),
                    spread_words(bands["plain"]),
                    spread_words(bands["plain_decode"]),
                    "" if over_stock is None else spread_words(over_stock),
                    *_latency(drafted),
                    f"{row['num_identical']}/{row['num_prompts']}",
                    str(row["num_looping"]),
                ]
            )
            band = bands["plain"]
            bars.append(svg.Bar(name, band["value"], band["low"], band["high"]))
        how = _how(config)
        heads = ["prompts", "tau micro", "tau macro", "plain tok/s", "drafted tok/s"]
        heads += ["over plain", "over plain, decoding", "over transformers", "TTFT ms", "TPOT ms"]
        heads += ["largest gap ms", "same tokens", "loops"]
        grids.append(Grid(how, f"{how}. {_BAND} {_PERCENTILES}", heads, rows))
        if "outside" in run:
            grids.append(_outside(run, how))
        title = f"Speed of drafted decoding, {how}; plain decoding is 1"
        plots[f"-{number + 1}"] = svg.bar_plot(title, "plain", bars)
    if (found := result.values.get("break_even_length")) is not None:
        return _lengths(result, found)
    return Section("bench speed", grids=grids, plots=plots)


def _lengths(result: Result, found: Values) -> Section:
    """Answers of fixed lengths: a row for each, instead of a table."""
    rows, bars = [], []
    for run in need(result, "runs"):
        row, length = run["figures"]["all"], counted(run["config"]["max_tokens"], "token")
        band, decoding = row["speedup_bands"]["plain"], row["speedup_bands"]["plain_decode"]
        ways = [row["ways"]["plain"], row["ways"]["drafted"]]
        rows.append(
            [
                length,
                *(three_digits(1000 * way["first_token_seconds"]["p50"]) for way in ways),
                *(three_digits(way["tokens_per_second"]) for way in ways),
                spread_words(band),
                spread_words(decoding),
                f"{ways[1]['tau_micro']:.2f}",
                f"{row['num_identical']}/{row['num_prompts']}",
            ]
        )
        bars.append(svg.Bar(length, band["value"], band["low"], band["high"]))
    heads = ["answer", "plain TTFT ms", "drafted TTFT ms", "plain tok/s", "drafted tok/s"]
    heads += ["over plain", "over plain, decoding", "tau", "same tokens"]
    about = f"Answers of exactly so many tokens. {_BAND} TTFT: median."
    fact = length_line(
        BreakEvenLength(
            tuple(found["lengths"]), found["at_least_as_fast_from"], found["surely_from"]
        )
    )
    title = "Speed of drafted decoding by length of the answer; plain decoding is 1"
    return Section(
        "bench speed --lengths",
        [f"{fact[0].upper()}{fact[1:]}."],
        [Grid("By length", about, heads, rows)],
        {"": svg.bar_plot(title, "plain", bars)},
    )


def _outside(run: Values, how: str) -> Grid:
    """Other engines, those without an answer too, with the reasons."""
    rows = []
    for name, row in run["outside"].items():
        ratios = [
            _rate(prompt["drafted"]) / _rate(prompt["outside"][name])
            for prompt in run["prompts"]
            if "token_ids" in prompt["outside"][name]
        ]
        versions = " ".join(f"{package} {version}" for package, version in row["versions"].items())
        passes, rate = row["tokens_per_pass"], row["rate"]
        rows.append(
            [
                f"{name} ({versions})" if versions else name,
                "" if rate is None else three_digits(rate["tokens_per_second"]),
                spread_words(row["over_plain"]),
                spread_words(row["drafted_over"]),
                "" if not ratios else three_digits(median(ratios)),
                "" if passes is None else f"{passes:.2f}",
                f"{row['num_equal']}/{row['num_answered']}",
                "; ".join(f"{number}: {reason}" for reason, number in row["failures"].items()),
            ]
        )
    heads = ["engine", "tok/s", "over our plain", "our drafted over it", "the same, median prompt"]
    heads += ["tokens a pass", "as our plain", "prompts without an answer"]
    return Grid("Other engines", f"Other engines, {how}. {_BAND}", heads, rows)


def _rate(output: Values) -> float:
    return float(len(output["token_ids"]) / output["total_seconds"])


def _ways(result: Result) -> Section:
    """Several ways to draft over the same prompts, by set."""
    figures, settings = need(result, "figures"), need(result, "settings")
    rows, totals, bars = [], [], []
    groups = list(next(iter(figures.values())))
    for way, by_group in figures.items():
        whole, straight = by_group["all"], by_group.get("no loops")
        drafted = whole["ways"]["drafted"]
        rows.append([way, *(_speedup_and_tau(by_group[group]) for group in groups)])
        totals.append(
            [
                way,
                f"{drafted['tau_micro']:.2f}",
                f"{drafted['tau_macro']:.2f}",
                three_digits(whole["plain"]["tokens_per_second"]),
                three_digits(whole["drafted"]["tokens_per_second"]),
                spread_words(whole["speedup_bands"]["plain"]),
                spread_words(whole["speedup_bands"]["plain_decode"]),
                "" if straight is None else _speedup_and_tau(straight),
                *_latency(drafted),
                f"{whole['num_identical']}/{whole['num_prompts']}",
            ]
        )
        band = whole["speedup_bands"]["plain"]
        bars.append(svg.Bar(way, band["value"], band["low"], band["high"]))
    heat = float(settings["temperature"])
    how = (
        f"{f'temperature {heat:g}' if heat else 'greedy'}, at most {settings['max_tokens']} tokens"
    )
    heads = ["way", "tau micro", "tau macro", "plain tok/s", "drafted tok/s", "over plain"]
    heads += ["over plain, decoding", "without loops", "TTFT ms", "TPOT ms", "largest gap ms"]
    counts = [f"{group} ({next(iter(figures.values()))[group]['num_prompts']})" for group in groups]
    about = f"{how}. Speed-up over plain decoding, with its 95 % band, and tau."
    title = f"Speed over plain decoding, all prompts, {how}"
    return Section(
        title="several ways to draft",
        grids=[
            Grid("All prompts", f"{how}. {_BAND} {_PERCENTILES}", [*heads, "same tokens"], totals),
            Grid("By set", about, ["way", *counts], rows),
            *_costs(result),
        ],
        plots={"": svg.bar_plot(title, "plain", bars)},
    )


def _costs(result: Result) -> list[Grid]:
    """What each way costs and what its drafter is, where a result says it."""
    ways = result.values.get("ways")
    if ways is None:
        return []
    rows = []
    for name, way in ways.items():
        training = way.get("training", {}).get("config", {})
        number, minutes = way.get("num_parameters"), training.get("max_minutes")
        rows.append(
            [
                name,
                "" if number is None else f"{number / 1e6:.1f}",
                "" if minutes is None else f"{minutes:g}",
                three_digits(way["draft_ms"]),
                three_digits(way["verify_ms"]),
            ]
        )
    heads = ["way", "parameters, millions", "minutes of training", "draft ms", "verify ms"]
    about = "Drafters, and milliseconds for each pass of the target, of drafting and of verifying."
    return [Grid("Costs", about, heads, rows)]


def _speedup_and_tau(row: Values) -> str:
    tau = row["ways"]["drafted"]["tau_micro"]
    return f"{spread_words(row['speedup_bands']['plain'])}, {tau:.2f}"


_BAND = "Speed-ups with the band in which 95 % of resamples of the prompts fall."
_PERCENTILES = "TTFT, TPOT and gap: median, 95th percentile, drafted."


def _how(config: Values) -> str:
    heat = config.get("temperature", 0.0)
    how = f"temperature {heat:g}" if heat else "greedy"
    return f"{how}, at most {config['max_tokens']} tokens"


def _latency(measures: Values) -> list[str]:
    cells = []
    for name in ("first_token_seconds", "seconds_per_token", "largest_gap"):
        found = measures[name]
        cells.append(
            ""
            if found is None
            else f"{three_digits(1000 * found['p50'])}, {three_digits(1000 * found['p95'])}"
        )
    return cells


def _concurrency(result: Result) -> Section:
    rows = []
    for row in need(result, "figures"):
        measures = row["measures"]
        rows.append(
            [
                f"{row['way']}, {row['concurrency']} at once",
                spread_words(row["tokens_per_second"]),
                spread_words(row["tokens_per_second_per_user"]),
                spread_words(row["speedup_over_plain"]),
                f"{measures['tau_micro']:.2f}",
                *_latency(measures),
                f"{row['num_identical']}/{row['num_outputs']}",
                str(measures["num_looping"]),
            ]
        )
    if not any(row["way"] == "plain" for row in result.values["figures"]):
        raise ConfigError(f"{result.path} lacks the baseline, plain decoding; measure again")
    heads = ["way", "tok/s in total", "per user", "over plain", "tau", "TTFT ms", "TPOT ms"]
    heads += ["largest gap ms", "same tokens", "loops"]
    lines: dict[str, list[svg.Dot]] = {}
    for row in result.values["figures"]:
        lines.setdefault(row["way"], []).append(
            svg.Dot(
                row["tokens_per_second_per_user"]["median"],
                row["tokens_per_second"]["median"],
                str(row["concurrency"]),
            )
        )
    how = _how(result.values["bench"])
    about = f"{how}. {_REPEATS}"
    return Section("bench concurrency", (), [Grid("", about, heads, rows)], {"": _curves(lines)})


_REPEATS = (
    "Median, and in brackets lowest and highest of the repeats; over plain decoding with as many "
    "requests at once. TTFT, TPOT and gap: median, 95th percentile."
)


def _curves(lines: Mapping[str, Sequence[svg.Dot]]) -> str:
    return svg.line_plot(
        "Throughput against interactivity; numbers: requests at once",
        "tokens per second of the median user",
        "tokens per second in total",
        lines,
    )


def _pareto(result: Result) -> Section:
    points = need(result, "points")
    if not any(point["way"] == "plain" for point in points):
        raise ConfigError(f"{result.path} lacks the baseline, plain decoding; measure again")
    rows: list[list[str]] = []
    lines: dict[str, list[svg.Dot]] = {}
    for point in points:
        measures, straight = point["measures"], point["without_loops"]
        rows.append(
            [
                f"{point['way']}, {point['concurrency']} at once",
                spread_words(point["throughput"]),
                spread_words(point["interactivity"]),
                spread_words(point["speedup_over_plain"]),
                f"{measures['tau_micro']:.2f}",
                "" if straight is None else f"{straight['tau_micro']:.2f}",
                *_latency(measures),
                f"{point['num_identical']}/{point['num_outputs']}",
            ]
        )
        lines.setdefault(point["way"], []).append(
            svg.Dot(
                point["interactivity"]["median"],
                point["throughput"]["median"],
                str(point["concurrency"]),
            )
        )
    heads = ["way", "tok/s in total", "per user", "over plain", "tau", "tau without loops"]
    heads += ["TTFT ms", "TPOT ms", "largest gap ms", "same tokens"]
    grids = [
        Grid("Measured points", f"{_how(result.values['bench'])}. {_REPEATS}", heads, rows),
        _readings(
            "At equal interactivity",
            "Tokens per second in total over those of plain decoding, where the median user is as "
            "fast as with so many requests at once plainly. Read between measured points only.",
            "tok/s per user",
            need(result, "at_equal_interactivity"),
        ),
        _readings(
            "At equal throughput",
            "Tokens per second of the median user over those of plain decoding, where as much is "
            "given in total. Read between measured points only.",
            "tok/s in total",
            need(result, "at_equal_throughput"),
        ),
    ]
    return Section("bench pareto", (), grids, {"": _curves(lines)})


def _readings(title: str, about: str, level: str, found: Sequence[Values]) -> Grid:
    ways = list(dict.fromkeys(row["way"] for row in found))
    levels = {row["plain_concurrency"]: row["level"] for row in found}
    by_place = {(row["plain_concurrency"], row["way"]): row for row in found}
    rows = [
        [
            f"{concurrency} at once",
            three_digits(at),
            *(_reading(by_place[concurrency, way]) for way in ways),
        ]
        for concurrency, at in levels.items()
    ]
    return Grid(title, about, ["plain decoding with", level, *ways], rows)


def _reading(row: Values) -> str:
    if row["ratio"] is None and row["outside"] is None:
        return "single tokens"
    if row["ratio"] is None:
        return f"{row['outside']} what was measured"
    return spread_words(row["ratio"])


def _never_slower(result: Result) -> Section:
    rows = [
        [
            f"{row['concurrency']} at once",
            spread_words(row["ratio"]),
            f"{row['slowdown']:.3f}",
            f"{row['limit']:.3f}",
            "yes" if row["holds"] else "NO",
            f"{row['acceptance_length']:.2f}",
            f"{row['num_identical']}/{row['num_outputs']}",
        ]
        for row in need(result, "figures")
    ]
    heads = ["requests", "over no drafter", "time", "allowed", "holds", "tau", "same tokens"]
    about = "Speed over an engine without a drafter: median, lowest and highest of the pairs."
    return Section("bench never-slower", grids=[Grid("", about, heads, rows)])


def _context(result: Result) -> Section:
    rows = [
        [
            str(row["prompt_len"]),
            three_digits(row["plain"]["decode_tokens_per_second"]),
            three_digits(row["drafted"]["decode_tokens_per_second"]),
            spread_words(row["decode_speedup"]),
            spread_words(row["total_speedup_spread"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['num_identical']}/{row['num_passages']}",
        ]
        for row in need(result, "figures")
    ]
    heads = ["tokens of prompt", "plain tok/s", "drafted tok/s", "over plain, decoding"]
    heads += ["over plain, whole", "tau", "same tokens"]
    about = "Greedy. Speed-ups: median, lowest and highest of the passages."
    return Section("bench context", grids=[Grid("", about, heads, rows)])


def _traffic(result: Result) -> Section:
    rows = []
    for row in need(result, "figures"):
        found, straight = row["measures"], row["without_loops"]
        cells = [""] * 7
        if found is not None:
            is_baseline = row["way"] == "plain"
            cells = [
                "" if is_baseline else spread_words(found["decode_speedup"]),
                "" if is_baseline else spread_words(found["speedup"]),
                f"{found['tau_micro']:.2f}",
                "" if straight is None else f"{straight['tau_micro']:.2f}",
                *_latency(found),
            ]
        total = spread_words(row["tokens_per_second_in_total"])
        counts = [f"{row['num_identical']}/{row['num_outputs']}", str(row["num_aborted"])]
        rows.append([row["way"], total, *cells, *counts])
    bench = need(result, "bench")
    heads = ["way", "tok/s in total", "over plain, decoding", "over plain, whole", "tau"]
    heads += ["tau without loops", "TTFT ms", "TPOT ms", "largest gap ms", "same tokens"]
    heads.append("given up")
    heats = ", ".join(f"{heat:g}" for heat in bench["temperatures"])
    about = (
        f"{bench['num_requests']} requests, {bench['requests_per_second']:g} per second, of "
        f"{bench['min_tokens']} to {bench['max_tokens']} tokens, temperature {heats}, at most "
        f"{bench['concurrency']} at once, played {bench['repeats']} times. Tokens in total: "
        f"median, lowest and highest of the repeats. {_BAND} TTFT, TPOT and gap: median, 95th "
        "percentile; without requests that were given up."
    )
    return Section("bench traffic", grids=[Grid("", about, heads, rows)])


def _break_even(result: Result) -> Section:
    found = need(result, "break_even")
    band = found.get("speedup_band")
    low, high = (None, None) if band is None else band
    row = [
        f"{need(result, 'forced_acceptance'):.0%} kept",
        f"{1000 * found['plain_step_seconds']:.3g}",
        f"{1000 * found['drafted_step_seconds']:.3g}",
        f"{found['step_ratio']:.2f}",
        f"{found['acceptance_length']:.2f}",
        spread_words({"value": found["speedup"], "low": low, "high": high}),
    ]
    heads = ["forced", "plain step ms", "drafted step ms", "pays from tau", "tau", "over plain"]
    return Section(
        "bench speed --force-acceptance",
        grids=[Grid("", str(need(result, "note")), heads, [row])],
    )


def _plan(result: Result) -> Section:
    goal, traffic, curve = (need(result, name) for name in ("goal", "traffic", "curve"))
    rows = []
    for row in need(result, "rows"):
        cells = ["never meets the goal", *[""] * 6]
        if row["replicas"] is not None:
            formula, played = row["formula"], row["simulation"]
            cells = [
                f"{row['replicas']} ({row['replicas_by_formula']})",
                f"{formula['utilization']:.0%}",
                *(
                    f"{three_digits(1000 * formula[name])}, {three_digits(1000 * played[name])}"
                    for name in ("first_token_seconds", "token_seconds")
                ),
                *(
                    "" if row[name] is None else f"{row[name]:.2f}"
                    for name in ("cost_per_hour", "cost_per_million_tokens")
                ),
                "" if row["off_from"] is None else f"{row['off_from']} at once",
            ]
        rows.append([row["way"], *cells])
    heads = ["way", "replicas (by formula)", "busy", "TTFT ms, simulated", "TPOT ms, simulated"]
    heads += ["cost per hour", "per million tokens", "no faster from"]
    limits = [
        f"{name} at most {1000 * goal[key]:g} ms"
        for name, key in (("TTFT", "first_token_seconds"), ("TPOT", "token_seconds"))
        if goal[key] is not None
    ]
    about = (
        f"{traffic['requests_per_second']:.3g} requests per second ({traffic['arrivals']}), "
        f"outputs of {traffic['mean_output_tokens']:.3g} tokens; {goal['percentile']:g} % of them: "
        f"{', '.join(limits)}. Curve: {curve['path']}, {curve['machine']}."
    )
    return Section("bench plan", grids=[Grid("", about, heads, rows)])


_SECTIONS: Mapping[str, Callable[[Result], Section]] = {
    "summary": _summary,
    "speed": _speed,
    "ways": _ways,
    "concurrency": _concurrency,
    "pareto": _pareto,
    "never-slower": _never_slower,
    "context": _context,
    "traffic": _traffic,
    "break-even": _break_even,
    "plan": _plan,
}


def published_section(results: Sequence[Result]) -> Section:
    """Figures of others, below one's own of the same sets."""
    rows = [row for result in results for row in _own_rows(result)]
    rows += [
        [
            f"published: {one.method}, {one.target}",
            f"{one.temperature:g}",
            *(f"{speedup:.2f}, {tau:.2f}" for speedup, tau in one.by_set),
            f"{one.average[0]:.2f}, {one.average[1]:.2f}",
            one.machine,
            one.source,
        ]
        for one in PUBLISHED
    ]
    loads = [
        [
            f"published: {one.method}, {one.target}",
            one.prompts,
            *(f"{speedup:.1f}" for speedup in one.speedups),
            f"{one.tau:.2f}",
            one.machine,
            one.source,
        ]
        for one in PUBLISHED_LOADS
    ]
    about = (
        'Speed-up over plain decoding, and tau. Rows named "published" were measured by others, on '
        "other machines, with other models and engines, and come without a spread: nothing follows "
        "from one of them beside a figure of yours, but for the order of magnitude."
    )
    heads = ["method", "temperature", *SETS, "all seven", "machine", "source"]
    load_heads = ["method", "prompts", *(f"{n} at once" for n in LOADS), "tau", "machine", "source"]
    return Section(
        "Beside figures that others published, on other machines",
        grids=[
            # Some of one's own have no band here either.
            _without_repeats(
                Grid("One request at a time", about, heads, rows), "*", "*: one prompt, no spread."
            ),
            Grid("Many requests at once", f"By load. {about}", load_heads, loads),
        ],
    )


def _own_rows(result: Result) -> list[list[str]]:
    """Of the sets that the published figures are of; the others are in their own section."""
    rows = []
    if result.kind == "summary":
        for run in need(result, "runs").values():
            for kind, heat in (("greedy", 0.0), ("sampled", run["sampled_temperature"])):
                by_set = {
                    name: f"{row[kind]['speedup']:.2f}, {row[kind]['tau']:.2f}"
                    for row in run["rows"]
                    if row[kind] is not None and (name := set_of(row["name"])) is not None
                }
                rows += _own_row(result, heat, by_set)
    if result.kind == "speed":
        for run in need(result, "runs"):
            by_set = {}
            for group, row in run["figures"].items():
                band, name = row["speedup_bands"]["plain"], set_of(group)
                if name is not None and band is not None:
                    by_set[name] = _speedup_and_tau(row)
            rows += _own_row(result, run["config"]["temperature"], by_set)
    if result.kind == "ways":
        heat = float(need(result, "settings")["temperature"])
        for way, by_group in need(result, "figures").items():
            by_set = {
                name: _speedup_and_tau(row)
                for group, row in by_group.items()
                if (name := set_of(group)) is not None
            }
            rows += _own_row(result, heat, by_set, way)
    return rows


def _own_row(
    result: Result, heat: float, by_set: Mapping[str, str], way: str = ""
) -> list[list[str]]:
    if not by_set:
        return []
    cells = [by_set.get(name, "") for name in SETS]
    name = f"yours: {result.name}, {way}" if way else f"yours: {result.name}"
    return [[name, f"{heat:g}", *cells, "", result.machine, str(result.path)]]
