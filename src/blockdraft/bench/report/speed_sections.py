"""Sections of what runs one request at a time: speed, several drafters, and long contexts."""

from statistics import median

from blockdraft.bench.report import svg
from blockdraft.bench.report.section import (
    BAND,
    Cells,
    Grid,
    Section,
    Values,
    bar_of,
    grid_of,
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
    for number, run in enumerate(runs, 1):
        figures, how = run["figures"], how_words(run["config"])
        rows = [_speed_row(name, row) for name, row in figures.items()]
        grids.append(grid_of(how, f"{how}. {BAND} {_PERCENTILES}", rows))
        if "outside" in run:
            grids.append(_outside(run, how))
        title = f"Speed of drafted decoding, {how}; plain decoding is 1"
        bars = [bar_of(name, row["speedup_bands"]["plain"]) for name, row in figures.items()]
        plots[f"-{number}"] = svg.bar_plot(title, bars)
    return Section("bench speed", grids=grids, plots=plots)


def _need_plain(result: Result, figures: Values) -> None:
    for name, row in figures.items():
        if "plain" not in row or row.get("ways", {}).get("drafted") is None:
            raise ConfigError(
                f"{result.path} lacks the baseline, plain decoding, for {name}; measure again"
            )


def _speed_row(name: str, row: Values) -> Cells:
    return {
        "prompts": f"{name} ({row['num_prompts']})",
        **_drafted_cells(row),
        "over transformers": spread_words(row["speedup_bands"].get("transformers")),
        **latency_cells(row["ways"]["drafted"]),
        "same tokens": f"{row['num_identical']}/{row['num_prompts']}",
        "loops": str(row["num_looping"]),
    }


def _drafted_cells(row: Values) -> Cells:
    """Both tau, both speeds, and speed-ups over plain decoding."""
    bands, drafted = row["speedup_bands"], row["ways"]["drafted"]
    return {
        "tau micro": tau_cell(drafted),
        "tau macro": tau_words(drafted["tau_macro"]),
        "plain tok/s": three_digits(row["plain"]["tokens_per_second"]),
        "drafted tok/s": three_digits(row["drafted"]["tokens_per_second"]),
        "speed-up": spread_words(bands["plain"]),
        "decode speed-up": spread_words(bands["plain_decode"]),
    }


def _lengths(result: Result, found: Values) -> Section:
    """Answers of fixed lengths: a row for each, instead of a table."""
    rows, bars = [], []
    for run in need(result, "runs"):
        row, length = run["figures"]["all"], counted(run["config"]["max_tokens"], "token")
        band, decoding = row["speedup_bands"]["plain"], row["speedup_bands"]["plain_decode"]
        plain, drafted = row["ways"]["plain"], row["ways"]["drafted"]
        rows.append(
            {
                "answer": length,
                "plain TTFT ms": three_digits(1000 * plain["first_token_seconds"]["p50"]),
                "drafted TTFT ms": three_digits(1000 * drafted["first_token_seconds"]["p50"]),
                "plain tok/s": three_digits(plain["tokens_per_second"]),
                "drafted tok/s": three_digits(drafted["tokens_per_second"]),
                "speed-up": spread_words(band),
                "decode speed-up": spread_words(decoding),
                "tau": tau_cell(drafted),
                "same tokens": f"{row['num_identical']}/{row['num_prompts']}",
            }
        )
        bars.append(bar_of(length, band))
    about = f"Answers of exactly so many tokens. {BAND} TTFT: median."
    fact = length_line(BreakEvenLength(**found))
    title = "Speed of drafted decoding by length of the answer; plain decoding is 1"
    return Section(
        "bench speed --lengths",
        [f"{fact[0].upper()}{fact[1:]}."],
        [grid_of("By length", about, rows)],
        {"": svg.bar_plot(title, bars)},
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
        as_its_plain = "" if own is None else f"{own['num_equal']}/{own['num_compared']}"
        failures = "; ".join(f"{number}: {reason}" for reason, number in row["failures"].items())
        rows.append(
            {
                "engine": f"{name} ({versions})" if versions else name,
                "tok/s": "" if rate is None else three_digits(rate["tokens_per_second"]),
                "over our plain": spread_words(row["over_plain"]),
                "our drafted over its": spread_words(row["drafted_over"]),
                "the same, median prompt": "" if not ratios else three_digits(median(ratios)),
                "tokens per pass": "" if passes is None else f"{passes:.2f}",
                "same as our plain": f"{row['num_equal']}/{row['num_answered']}",
                "same as its own plain": as_its_plain,
                "prompts without an answer": failures,
            }
        )
    return grid_of("Other engines", f"Other engines, {how}. {BAND}", rows)


def _rate(output: Values) -> float:
    return float(len(output["token_ids"]) / output["total_seconds"])


def ways_section(result: Result) -> Section:
    """Several drafting configurations over the same prompts, by set."""
    figures, settings = need(result, "figures"), need(result, "settings")
    rows, totals, bars = [], [], []
    groups = next(iter(figures.values()))
    heads = {group: f"{group} ({row['num_prompts']})" for group, row in groups.items()}
    for way, by_group in figures.items():
        whole, without_loops = by_group["all"], by_group.get("no loops")
        by_head = {head: speedup_and_tau(by_group[group]) for group, head in heads.items()}
        rows.append({"configuration": way, **by_head})
        totals.append(
            {
                "configuration": way,
                **_drafted_cells(whole),
                "without loops": "" if without_loops is None else speedup_and_tau(without_loops),
                **latency_cells(whole["ways"]["drafted"]),
                "same tokens": f"{whole['num_identical']}/{whole['num_prompts']}",
            }
        )
        bars.append(bar_of(way, whole["speedup_bands"]["plain"]))
    how = how_words(settings)
    about = f"{how}. Speed-up over plain decoding, with its 95 % interval, and tau."
    title = f"Speed over plain decoding, all prompts, {how}"
    return Section(
        title="several drafting configurations",
        grids=[
            grid_of("All prompts", f"{how}. {BAND} {_PERCENTILES}", totals),
            grid_of("By set", about, rows),
            *_costs(result),
        ],
        plots={"": svg.bar_plot(title, bars)},
    )


def _costs(result: Result) -> list[Grid]:
    """What each configuration costs and what its drafter is, where a result says it."""
    ways = result.values.get("ways")
    if ways is None:
        return []
    rows = []
    for name, way in ways.items():
        training = way.get("training", {}).get("config", {})
        number, minutes = way.get("num_parameters"), training.get("max_minutes")
        rows.append(
            {
                "configuration": name,
                "parameters, millions": "" if number is None else f"{number / 1e6:.1f}",
                "minutes of training": "" if minutes is None else f"{minutes:g}",
                "draft ms": three_digits(way["draft_ms"]),
                "verify ms": three_digits(way["verify_ms"]),
            }
        )
    about = "Drafters, and the milliseconds that drafting and verifying take per target pass."
    return [grid_of("Costs", about, rows)]


def speedup_and_tau(row: Values) -> str:
    """Of a group of prompts, drafted over plain."""
    tau = row["ways"]["drafted"]["tau_micro"]
    return f"{spread_words(row['speedup_bands']['plain'])}, {tau:.2f}"


def context_section(result: Result) -> Section:
    """A row for each length of the prompt."""
    rows = [
        {
            "prompt tokens": str(row["prompt_len"]),
            "plain tok/s": three_digits(row["plain"]["decode_tokens_per_second"]),
            "drafted tok/s": three_digits(row["drafted"]["decode_tokens_per_second"]),
            "decode speed-up": spread_words(row["decode_speedup"]),
            "end-to-end speed-up": spread_words(row["total_speedup_spread"]),
            "tau": f"{row['acceptance_length']:.2f}",
            "same tokens": f"{row['num_identical']}/{row['num_passages']}",
        }
        for row in need(result, "figures")
    ]
    about = "Greedy. Speed-ups: median, lowest and highest of the passages."
    return Section("bench context", grids=[grid_of("", about, rows)])


def break_even_section(result: Result) -> Section:
    """What a drafted step costs beside a plain one."""
    found = need(result, "break_even")
    band = found.get("speedup_band")
    low, high = (None, None) if band is None else band
    row = {
        "forced": f"{need(result, 'forced_acceptance'):.0%} accepted",
        "plain step ms": f"{1000 * found['plain_step_seconds']:.3g}",
        "drafted step ms": f"{1000 * found['drafted_step_seconds']:.3g}",
        "break-even tau": f"{found['step_ratio']:.2f}",
        "tau": f"{found['acceptance_length']:.2f}",
        "speed-up": spread_words({"value": found["speedup"], "low": low, "high": high}),
    }
    grid = grid_of("", str(need(result, "note")), [row])
    return Section("bench speed --force-acceptance", grids=[grid])
