"""`bench pareto`, for people and for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.table import Table

from blockdraft.bench.config import ParetoConfig
from blockdraft.bench.decode import PLAIN
from blockdraft.bench.load.curve import no_faster_from
from blockdraft.bench.load.pareto import (
    PARETO_DEFINITIONS,
    CurveReading,
    ParetoBench,
    ParetoPoint,
    pareto_points,
    readings,
)
from blockdraft.bench.load.repeats import Repeat
from blockdraft.bench.result import describe_result
from blockdraft.bench.tables import empty_table, spread_cells, three_digits
from blockdraft.core.grouping import grouped

PARETO_LEGEND = """\
requests: how many run concurrently. in total: output tokens per second of all
requests. per user: those of the median request, after its first token. over
plain: in total, with as many requests. Medians and low-high over the repeats.
tau: tokens per target pass. same: outputs that equal those of plain decoding at
the first point. Interpolated between measured points only: the total throughput
of a configuration whose users are as fast as with plain decoding, and the speed
of its users at the same total throughput; both divided by the best of plain
decoding at that level."""


def pareto_json(
    bench: ParetoBench,
    config: ParetoConfig,
    repeats: Sequence[Repeat],
    prompt_len: float,
    num_resumed: int = 0,
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result, and to plan by it."""
    at_interactivity, at_throughput = readings(repeats)
    folders = {
        way.name: None if way == PLAIN else decoder.llm.drafter_folder
        for decoder, way in bench.sides
    }
    drafters = {name: None if folder is None else str(folder) for name, folder in folders.items()}
    return {
        **describe_result("pareto", bench.llm, PARETO_DEFINITIONS, num_resumed),
        "bench": asdict(config) | {"num_requests": config.requests_per_point},
        "mean_prompt_tokens": prompt_len,
        "mean_output_tokens": fmean(
            len(ids) for repeat in repeats for ids in repeat.runs[PLAIN.name].outputs
        ),
        "ways": [asdict(way) | {"drafter": drafters[way.name]} for way in bench.ways],
        "points": [asdict(point) for point in pareto_points(repeats)],
        "at_equal_interactivity": [asdict(reading) for reading in at_interactivity],
        "at_equal_throughput": [asdict(reading) for reading in at_throughput],
        "runs": [
            {
                "concurrency": repeat.concurrency,
                "repeat": repeat.number,
                "way": way,
                "wall_seconds": run.wall_seconds,
                "throughput": run.tokens_per_second,
                "interactivity": run.tokens_per_second_per_user,
            }
            for repeat in repeats
            for way, run in repeat.runs.items()
        ],
    }


def pareto_tables(title: str, points: Sequence[ParetoPoint]) -> list[Table]:
    """A table for each configuration, with a row for each concurrency; they fit 80 columns."""
    by_way = grouped(points, lambda point: point.way)
    return [_way_table(f"{way}: {title}", group) for way, group in by_way.items()]


def _way_table(title: str, points: Sequence[ParetoPoint]) -> Table:
    headings = ("at\nonce", "in\ntotal", "low-high", "per\nuser", "low-high", "over\nplain")
    view = empty_table(title, *headings, "low-high", "tau", "same")
    for point in points:
        view.add_row(
            str(point.concurrency),
            *spread_cells(point.throughput),
            *spread_cells(point.interactivity),
            *spread_cells(point.speedup_over_plain),
            three_digits(point.measures.tau_micro),
            f"{point.num_identical}/{point.num_outputs}",
        )
    return view


def reading_table(title: str, level: str, rows: Sequence[CurveReading]) -> Table:
    """One row for each configuration and concurrency of plain decoding; fits 80 columns."""
    view = empty_table(title, "", "plain,\nrequests", level, "over\nplain", "low-high")
    for index, reading in enumerate(rows):
        is_first = index == 0 or rows[index - 1].way != reading.way
        if is_first:
            view.add_section()
        view.add_row(
            reading.way if is_first else "",
            str(reading.plain_concurrency),
            three_digits(reading.level),
            *_cells(reading),
        )
    return view


def _cells(reading: CurveReading) -> tuple[str, str]:
    if reading.ratio is None:
        return "-", outside_words(reading.outside)
    return spread_cells(reading.ratio)


def outside_words(outside: str | None) -> str:
    """Where a level lies that nothing could be read at; None if it lies at no speed."""
    return "single tokens" if outside is None else f"{outside} its range"


def crossing_lines(points: Sequence[ParetoPoint]) -> list[str]:
    """Where plain decoding gives at least as much in total, a line for each configuration."""
    lines = []
    for way in dict.fromkeys(point.way for point in points if point.way != PLAIN.name):
        speedups = {
            point.concurrency: point.speedup_over_plain.median
            for point in points
            if point.way == way
        }
        limit = no_faster_from(speedups)
        if limit is None:
            lines.append(f"{way}: still more than plain in total at concurrency {max(speedups)}")
        else:
            lines.append(f"{way}: no more than plain in total from concurrency {limit} on")
    return lines
