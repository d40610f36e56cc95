"""Sections of what runs many requests at once, and of plans for it."""

from collections.abc import Iterable, Sequence

from blockdraft.bench.report import svg
from blockdraft.bench.report.section import (
    BAND,
    Grid,
    Section,
    Values,
    how_words,
    latency_cells,
    need_plain,
    spread_words,
    tau_cell,
)
from blockdraft.bench.result import Result, need
from blockdraft.bench.tables import tau_words, three_digits

_REPEATS = (
    "Median, and in brackets lowest and highest of the repeats; over plain decoding with as many "
    "requests at once. TTFT, TPOT and gap: median, 95th percentile."
)


def concurrency_section(result: Result) -> Section:
    """A row for each way and number of requests at once."""
    figures = need(result, "figures")
    need_plain(result, figures)
    rows = []
    for row in figures:
        measures = row["measures"]
        rows.append(
            [
                f"{row['way']}, {row['concurrency']} at once",
                spread_words(row["tokens_per_second"]),
                spread_words(row["tokens_per_second_per_user"]),
                spread_words(row["speedup_over_plain"]),
                tau_cell(measures),
                *latency_cells(measures),
                f"{row['num_identical']}/{row['num_outputs']}",
                str(measures["num_looping"]),
            ]
        )
    heads = ["way", "tok/s in total", "per user", "over plain", "tau", "TTFT ms", "TPOT ms"]
    heads += ["largest gap ms", "same tokens", "loops"]
    about = f"{how_words(result.values['bench'])}. {_REPEATS}"
    plot = _curves(figures, "tokens_per_second_per_user", "tokens_per_second")
    return Section("bench concurrency", (), [Grid("", about, heads, rows)], {"": plot})


def _curves(points: Iterable[Values], interactivity: str, throughput: str) -> str:
    """A line for each way; the names are those of both axes in a point."""
    lines: dict[str, list[svg.Dot]] = {}
    for point in points:
        x, y = point[interactivity]["median"], point[throughput]["median"]
        lines.setdefault(point["way"], []).append(svg.Dot(x, y, str(point["concurrency"])))
    return svg.line_plot(
        "Throughput against interactivity; numbers: requests at once",
        "tokens per second of the median user",
        "tokens per second in total",
        lines,
    )


def pareto_section(result: Result) -> Section:
    """The measured points, and what is read off the curves between them."""
    points = need(result, "points")
    need_plain(result, points)
    rows = []
    for point in points:
        measures = point["measures"]
        rows.append(
            [
                f"{point['way']}, {point['concurrency']} at once",
                spread_words(point["throughput"]),
                spread_words(point["interactivity"]),
                spread_words(point["speedup_over_plain"]),
                tau_cell(measures),
                tau_cell(point["without_loops"]),
                *latency_cells(measures),
                f"{point['num_identical']}/{point['num_outputs']}",
            ]
        )
    heads = ["way", "tok/s in total", "per user", "over plain", "tau", "tau without loops"]
    heads += ["TTFT ms", "TPOT ms", "largest gap ms", "same tokens"]
    grids = [
        Grid("Measured points", f"{how_words(result.values['bench'])}. {_REPEATS}", heads, rows),
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
    plot = _curves(points, "interactivity", "throughput")
    return Section("bench pareto", (), grids, {"": plot})


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


def never_slower_section(result: Result) -> Section:
    """A row for each number of requests at once."""
    rows = [
        [
            f"{row['concurrency']} at once",
            spread_words(row["ratio"]),
            f"{row['slowdown']:.3f}",
            f"{row['limit']:.3f}",
            "yes" if row["holds"] else "NO",
            tau_words(row["acceptance_length"]),
            f"{row['num_identical']}/{row['num_outputs']}",
        ]
        for row in need(result, "figures")
    ]
    heads = ["requests", "over no drafter", "time", "allowed", "holds", "tau", "same tokens"]
    about = "Speed over an engine without a drafter: median, lowest and highest of the pairs."
    return Section("bench never-slower", grids=[Grid("", about, heads, rows)])


def traffic_section(result: Result) -> Section:
    """A row for each way."""
    rows = []
    for row in need(result, "figures"):
        found = row["measures"]
        cells = [""] * 7
        if found is not None:
            cells = [
                spread_words(found["decode_speedup"]),
                spread_words(found["speedup"]),
                tau_cell(found),
                tau_cell(row["without_loops"]),
                *latency_cells(found),
            ]
        total = spread_words(row["tokens_per_second_in_total"])
        counts = [f"{row['num_identical']}/{row['num_outputs']}", str(row["num_aborted"])]
        rows.append([row["way"], total, *cells, *counts])
    bench = need(result, "bench")
    heads = ["way", "tok/s in total", "over plain, decoding", "over plain, whole", "tau"]
    heads += ["tau without loops", "TTFT ms", "TPOT ms", "largest gap ms", "same tokens"]
    heads.append("given up")
    temperatures = ", ".join(f"{one:g}" for one in bench["temperatures"])
    about = (
        f"{bench['num_requests']} requests, {bench['requests_per_second']:g} per second, of "
        f"{bench['min_tokens']} to {bench['max_tokens']} tokens, temperature {temperatures}, at "
        f"most {bench['concurrency']} at once, played {bench['repeats']} times. Tokens in total: "
        f"median, lowest and highest of the repeats. {BAND} TTFT, TPOT and gap: median, 95th "
        "percentile; without requests that were given up."
    )
    return Section("bench traffic", grids=[Grid("", about, heads, rows)])


def plan_section(result: Result) -> Section:
    """A row for each way, with the replicas that it takes."""
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
