"""Sections of what runs one request at a time: speed, ways to draft, and long contexts."""

from statistics import median

from blockdraft.bench.report import svg
from blockdraft.bench.report.section import (
    BAND,
    Grid,
    Section,
    Values,
    bar_of,
    how_words,
    latency_cells,
    spread_words,
    tau_cell,
)
from blockdraft.bench.result import Result, need
from blockdraft.bench.speed.lengths import BreakEvenLength, length_line
from blockdraft.bench.tables import tau_words, three_digits
from blockdraft.core.errors import ConfigError
from blockdraft.core.words import counted

_PERCENTILES = "TTFT, TPOT and gap: median, 95th percentile, drafted."


def speed_section(result: Result) -> Section:
    """A table and a plot for each temperature, or one for all lengths of answers."""
    runs = need(result, "runs")
    for run in runs:
        _need_plain(result, run["figures"])
    if (found := result.values.get("break_even_length")) is not None:
        return _lengths(result, found)
    grids, plots = [], {}
    heads = ["prompts", "tau micro", "tau macro", "plain tok/s", "drafted tok/s"]
    heads += ["over plain", "over plain, decoding", "over transformers", "TTFT ms", "TPOT ms"]
    heads += ["largest gap ms", "same tokens", "loops"]
    for number, run in enumerate(runs, 1):
        figures, how = run["figures"], how_words(run["config"])
        rows = [_speed_row(name, row) for name, row in figures.items()]
        grids.append(Grid(how, f"{how}. {BAND} {_PERCENTILES}", heads, rows))
        if "outside" in run:
            grids.append(_outside(run, how))
        title = f"Speed of drafted decoding, {how}; plain decoding is 1"
        bars = [bar_of(name, row["speedup_bands"]["plain"]) for name, row in figures.items()]
        plots[f"-{number}"] = svg.bar_plot(title, "plain", bars)
    return Section("bench speed", grids=grids, plots=plots)


def _need_plain(result: Result, figures: Values) -> None:
    for name, row in figures.items():
        if "plain" not in row or row.get("ways", {}).get("drafted") is None:
            raise ConfigError(
                f"{result.path} lacks the baseline, plain decoding, for {name}; measure again"
            )


def _speed_row(name: str, row: Values) -> list[str]:
    return [
        f"{name} ({row['num_prompts']})",
        *_drafted_cells(row),
        spread_words(row["speedup_bands"].get("transformers")),
        *latency_cells(row["ways"]["drafted"]),
        f"{row['num_identical']}/{row['num_prompts']}",
        str(row["num_looping"]),
    ]


def _drafted_cells(row: Values) -> list[str]:
    """Both tau, both speeds, and speed-ups over plain decoding."""
    bands, drafted = row["speedup_bands"], row["ways"]["drafted"]
    return [
        tau_cell(drafted),
        tau_words(drafted["tau_macro"]),
        three_digits(row["plain"]["tokens_per_second"]),
        three_digits(row["drafted"]["tokens_per_second"]),
        spread_words(bands["plain"]),
        spread_words(bands["plain_decode"]),
    ]


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
                tau_cell(ways[1]),
                f"{row['num_identical']}/{row['num_prompts']}",
            ]
        )
        bars.append(bar_of(length, band))
    heads = ["answer", "plain TTFT ms", "drafted TTFT ms", "plain tok/s", "drafted tok/s"]
    heads += ["over plain", "over plain, decoding", "tau", "same tokens"]
    about = f"Answers of exactly so many tokens. {BAND} TTFT: median."
    fact = length_line(BreakEvenLength(**found))
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
        own = row.get("as_its_plain")  # older results do not tell
        rows.append(
            [
                f"{name} ({versions})" if versions else name,
                "" if rate is None else three_digits(rate["tokens_per_second"]),
                spread_words(row["over_plain"]),
                spread_words(row["drafted_over"]),
                "" if not ratios else three_digits(median(ratios)),
                "" if passes is None else f"{passes:.2f}",
                f"{row['num_equal']}/{row['num_answered']}",
                "" if own is None else f"{own['num_equal']}/{own['num_compared']}",
                "; ".join(f"{number}: {reason}" for reason, number in row["failures"].items()),
            ]
        )
    heads = ["engine", "tok/s", "over our plain", "our drafted over it", "the same, median prompt"]
    heads += ["tokens a pass", "as our plain", "as its own plain", "prompts without an answer"]
    return Grid("Other engines", f"Other engines, {how}. {BAND}", heads, rows)


def _rate(output: Values) -> float:
    return float(len(output["token_ids"]) / output["total_seconds"])


def ways_section(result: Result) -> Section:
    """Several ways to draft over the same prompts, by set."""
    figures, settings = need(result, "figures"), need(result, "settings")
    rows, totals, bars = [], [], []
    groups = list(next(iter(figures.values())))
    for way, by_group in figures.items():
        whole, without_loops = by_group["all"], by_group.get("no loops")
        rows.append([way, *(speedup_and_tau(by_group[group]) for group in groups)])
        totals.append(
            [
                way,
                *_drafted_cells(whole),
                "" if without_loops is None else speedup_and_tau(without_loops),
                *latency_cells(whole["ways"]["drafted"]),
                f"{whole['num_identical']}/{whole['num_prompts']}",
            ]
        )
        bars.append(bar_of(way, whole["speedup_bands"]["plain"]))
    how = how_words(settings)
    heads = ["way", "tau micro", "tau macro", "plain tok/s", "drafted tok/s", "over plain"]
    heads += ["over plain, decoding", "without loops", "TTFT ms", "TPOT ms", "largest gap ms"]
    counts = [f"{group} ({next(iter(figures.values()))[group]['num_prompts']})" for group in groups]
    about = f"{how}. Speed-up over plain decoding, with its 95 % band, and tau."
    title = f"Speed over plain decoding, all prompts, {how}"
    return Section(
        title="several ways to draft",
        grids=[
            Grid("All prompts", f"{how}. {BAND} {_PERCENTILES}", [*heads, "same tokens"], totals),
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


def speedup_and_tau(row: Values) -> str:
    """Of a group of prompts, drafted over plain."""
    tau = row["ways"]["drafted"]["tau_micro"]
    return f"{spread_words(row['speedup_bands']['plain'])}, {tau:.2f}"


def context_section(result: Result) -> Section:
    """A row for each length of the prompt."""
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


def break_even_section(result: Result) -> Section:
    """What a drafted step costs beside a plain one."""
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
