"""`bench traffic`, for people and for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blockdraft.bench.config import TrafficConfig
from blockdraft.bench.load.traffic import (
    TRAFFIC_DEFINITIONS,
    Repeat,
    Request,
    TrafficFigures,
    traffic_figures,
)
from blockdraft.bench.measures import Percentiles
from blockdraft.bench.result import describe_result
from blockdraft.bench.tables import (
    empty_table,
    speedup_cell,
    spread_cells,
    tau_words,
    three_digits,
)
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.llm import LLM

TRAFFIC_LEGEND = """\
tok/s: tokens of all requests divided by the wall time, median and low-high of
the repeats. over plain: speed-up from the first token on, with its 95 %
interval; whole: from arrival to last token. TTFT, TPOT, gap: median and 95th
percentile, milliseconds. tau: tokens per target pass. same: outputs that equal
those of plain decoding. Aborted requests count for tok/s and same."""


def traffic_json(
    llm: LLM,
    config: TrafficConfig,
    requests: Sequence[Request],
    ids: Sequence[str],
    repeats: Sequence[Repeat],
    num_resumed: int = 0,
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result; `ids` are those of the prompts."""
    return {
        **describe_result("traffic", llm, TRAFFIC_DEFINITIONS, num_resumed),
        "bench": asdict(config),
        "figures": [asdict(row) for row in traffic_figures(repeats, requests)],
        "requests": _describe_requests(requests, ids),
        "repeats": _describe_repeats(repeats),
    }


def _describe_repeats(repeats: Sequence[Repeat]) -> list[dict[str, Any]]:
    return [
        {
            name: {
                "wall_seconds": play.wall_seconds,
                "answers": [
                    {
                        "token_ids": answer.token_ids,
                        "aborted": answer.timed is None,
                        **({} if answer.timed is None else _times(answer.timed)),
                    }
                    for answer in play.answers
                ],
            }
            for name, play in repeat.items()
        }
        for repeat in repeats
    ]


def _times(sample: TimedOutput) -> dict[str, Any]:
    names = ("total_seconds", "decode_seconds", "queue_seconds", "largest_gap")
    return {name: getattr(sample, name) for name in names}


def _describe_requests(requests: Sequence[Request], ids: Sequence[str]) -> list[dict[str, Any]]:
    """Prompts by the names of their rows."""
    return [asdict(one) | {"prompt_id": ids[one.prompt]} for one in requests]


def traffic_table(title: str, rows: Sequence[TrafficFigures]) -> Table:
    """One row for each configuration; fits 80 columns."""
    view = empty_table(
        title,
        *("", "tok/s", "low-high", "over\nplain", "whole", "tau", "TTFT\nms", "TPOT\nms"),
        *("gap\nms", "same"),
    )
    for row in rows:
        found = row.measures
        cells = [""] * 6
        if found is not None:
            cells = [
                speedup_cell(found.decode_speedup),
                speedup_cell(found.speedup),
                tau_words(found.tau_micro),
                *map(
                    _milliseconds,
                    (found.first_token_seconds, found.seconds_per_token, found.largest_gap),
                ),
            ]
        view.add_row(
            row.way,
            *spread_cells(row.tokens_per_second_in_total),
            *cells,
            f"{row.num_identical}/{row.num_outputs}",
        )
    return view


def _milliseconds(found: Percentiles | None) -> str:
    if found is None:
        return ""
    return f"{three_digits(1000 * found.p50)}\n{three_digits(1000 * found.p95)}"
