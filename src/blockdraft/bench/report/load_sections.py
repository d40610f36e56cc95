"""Sections of what runs concurrent requests, and of plans for it."""

from collections.abc import Iterable, Sequence

from blockdraft.bench.report import svg
from blockdraft.bench.report.section import (
    BAND,
    Cells,
    Grid,
    Section,
    Values,
    grid_of,
    how_words,
    latency_cells,
    need_plain,
    spread_words,
    tau_cell,
)
from blockdraft.bench.result import Result, need
from blockdraft.bench.tables import tau_words, three_digits

_REPEATS = (
    "Median, and in parentheses lowest and highest, of the repeats; speed-up over plain decoding "
    "with as many concurrent requests. TTFT, TPOT and gap: median, 95th percentile."
)

_READ = (
    "Interpolated between measured points only; of several values at a level, plain decoding's "
    "too, the largest counts."
)


def concurrency_section(result: Result) -> Section:
    """A row for each configuration and concurrency."""
    figures = need(result, "figures")
    need_plain(result, figures)
    names = "tokens_per_second", "tokens_per_second_per_user"
    rows = [
        {
            **_speed_cells(row, *names),
            **latency_cells(row["measures"]),
            "same tokens": f"{row['num_identical']}/{row['num_outputs']}",
            "loops": str(row["measures"]["num_looping"]),
        }
        for row in figures
    ]
    about = f"{how_words(result.values['bench'])}. {_REPEATS}"
    plot = _curves(figures, *names)
    return Section("bench concurrency", (), [grid_of("", about, rows)], {"": plot})


def _speed_cells(row: Values, throughput: str, interactivity: str) -> Cells:
    """Of a configuration at one concurrency; the last two are the names of both axes."""
    return {
        "configuration": f"{row['way']}, concurrency {row['concurrency']}",
        "total tok/s": spread_words(row[throughput]),
        "per user": spread_words(row[interactivity]),
        "speed-up": spread_words(row["speedup_over_plain"]),
        "tau": tau_cell(row["measures"]),
    }


def _curves(points: Iterable[Values], throughput: str, interactivity: str) -> str:
    """A line for each configuration; the names are those of both axes in a point."""
    lines: dict[str, list[svg.Dot]] = {}
    for point in points:
        x, y = point[interactivity]["median"], point[throughput]["median"]
        lines.setdefault(point["way"], []).append(svg.Dot(x, y, str(point["concurrency"])))
    return svg.line_plot(
        "Throughput against interactivity; numbers: concurrent requests",
        "tokens per second of the median user",
        "total tokens per second",
        lines,
    )


def pareto_section(result: Result) -> Section:
    """The measured points, and what is read off the curves between them."""
    points = need(result, "points")
    need_plain(result, points)
    rows = [
        {
            **_speed_cells(point, "throughput", "interactivity"),
            "tau without loops": tau_cell(point["without_loops"]),
            **latency_cells(point["measures"]),
            "same tokens": f"{point['num_identical']}/{point['num_outputs']}",
        }
        for point in points
    ]
    grids = [
        grid_of("Measured points", f"{how_words(result.values['bench'])}. {_REPEATS}", rows),
        _readings(
            "At equal interactivity",
            "Total tokens per second divided by those of plain decoding, where the median user is "
            f"as fast as in plain decoding with so many concurrent requests. {_READ}",
            "tok/s per user",
            need(result, "at_equal_interactivity"),
        ),
        _readings(
            "At equal throughput",
            "Tokens per second of the median user divided by those of plain decoding, at the same "
            f"total throughput. {_READ}",
            "total tok/s",
            need(result, "at_equal_throughput"),
        ),
    ]
    plot = _curves(points, "throughput", "interactivity")
    return Section("bench pareto", (), grids, {"": plot})


def _readings(title: str, about: str, level: str, found: Sequence[Values]) -> Grid:
    ways = list(dict.fromkeys(row["way"] for row in found))
    levels = {row["plain_concurrency"]: row["level"] for row in found}
    by_place = {(row["plain_concurrency"], row["way"]): row for row in found}
    rows = [
        {
            "plain, concurrency": str(concurrency),
            level: three_digits(at),
            **{way: _reading(by_place[concurrency, way]) for way in ways},
        }
        for concurrency, at in levels.items()
    ]
    return grid_of(title, about, rows)


def _reading(row: Values) -> str:
    if row["ratio"] is None and row["outside"] is None:
        return "single tokens"
    if row["ratio"] is None:
        return f"{row['outside']} what was measured"
    return spread_words(row["ratio"])


def never_slower_section(result: Result) -> Section:
    """A row for each concurrency."""
    rows = [
        {
            "concurrency": str(row["concurrency"]),
            "over no drafter": spread_words(row["ratio"]),
            "time": f"{row['slowdown']:.3f}",
            "allowed": f"{row['limit']:.3f}",
            "holds": "yes" if row["holds"] else "NO",
            "tau": tau_words(row["acceptance_length"]),
            "same tokens": f"{row['num_identical']}/{row['num_outputs']}",
        }
        for row in need(result, "figures")
    ]
    about = "Speed over an engine without a drafter: median, lowest and highest of the pairs."
    return Section("bench never-slower", grids=[grid_of("", about, rows)])


def traffic_section(result: Result) -> Section:
    """A row for each configuration."""
    rows = []
    for row in need(result, "figures"):
        found = row["measures"]  # None where every request was aborted
        rows.append(
            {
                "configuration": row["way"],
                "total tok/s": spread_words(row["tokens_per_second_in_total"]),
                "decode speed-up": spread_words(found and found["decode_speedup"]),
                "end-to-end speed-up": spread_words(found and found["speedup"]),
                "tau": tau_cell(found),
                "tau without loops": tau_cell(row["without_loops"]),
                **latency_cells(found),
                "same tokens": f"{row['num_identical']}/{row['num_outputs']}",
                "aborted": str(row["num_aborted"]),
            }
        )
    bench = need(result, "bench")
    temperatures = ", ".join(f"{one:g}" for one in bench["temperatures"])
    about = (
        f"{bench['num_requests']} requests, {bench['requests_per_second']:g} per second, of "
        f"{bench['min_tokens']} to {bench['max_tokens']} tokens, temperature {temperatures}, at "
        f"most {bench['concurrency']} concurrently, played {bench['repeats']} times. Total tok/s: "
        f"median, lowest and highest of the repeats. {BAND} TTFT, TPOT and gap: median, 95th "
        "percentile, without aborted requests."
    )
    return Section("bench traffic", grids=[grid_of("", about, rows)])


def plan_section(result: Result) -> Section:
    """A row for each configuration, with the replicas that it takes."""
    goal, traffic, curve = (need(result, name) for name in ("goal", "traffic", "curve"))
    rows = []
    for row in need(result, "rows"):
        cells = {"configuration": row["way"], "replicas (by formula)": "never meets the goal"}
        if row["replicas"] is not None:
            formula, played = row["formula"], row["simulation"]
            cells["replicas (by formula)"] = f"{row['replicas']} ({row['replicas_by_formula']})"
            cells["busy"] = f"{formula['utilization']:.0%}"
            for head, key in (("TTFT", "first_token_seconds"), ("TPOT", "token_seconds")):
                both = [three_digits(1000 * found[key]) for found in (formula, played)]
                cells[f"{head} ms, simulated"] = ", ".join(both)
            hour, tokens = row["cost_per_hour"], row["cost_per_million_tokens"]
            cells["cost per hour"] = "" if hour is None else f"{hour:.2f}"
            cells["per million tokens"] = "" if tokens is None else f"{tokens:.2f}"
            off = row["off_from"]
            cells["no faster from"] = "" if off is None else f"concurrency {off}"
        rows.append(cells)
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
    return Section("bench plan", grids=[grid_of("", about, rows)])
