"""`bench context`, for people and for machines."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blockdraft.bench.config import ContextConfig
from blockdraft.bench.context.bench import (
    CONTEXT_DEFINITIONS,
    ContextFigures,
    ContextMeasurement,
    context_figures,
)
from blockdraft.bench.context.prose import Prose
from blockdraft.bench.result import describe_result
from blockdraft.bench.speed.report import describe_output
from blockdraft.bench.tables import empty_table, spread_cells, three_digits
from blockdraft.llm import LLM

CONTEXT_LEGEND = """\
plain, drafts: output tokens per second after the first token, without and with
drafting. over plain: speed-up, median and low-high over the passages; whole:
low-high with prefill. tau: tokens per target pass. depth: longest drafted path
of a target pass, on average. first token: median seconds from the request,
drafted. K/V: MB of KV cache, target + drafter. same: drafted output equals
plain output."""

_MB = 1_000_000


def context_json(
    llm: LLM,
    config: ContextConfig,
    prose: Prose,
    measurements: Sequence[ContextMeasurement],
    num_resumed: int = 0,
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result."""
    return {
        **describe_result("context", llm, CONTEXT_DEFINITIONS, num_resumed),
        "bench": asdict(config),
        "text": prose.describe(),
        "figures": [asdict(row) for row in context_figures(llm, measurements)],
        "passages": [
            {
                "requested_len": measured.requested_len,
                "prompt_len": measured.prompt_len,
                "identical": measured.identical,
                "plain": describe_output(measured.plain),
                "drafted": describe_output(measured.drafted),
            }
            for measured in measurements
        ],
    }


def context_table(title: str, rows: Sequence[ContextFigures]) -> Table:
    """One row per length; fits 80 columns."""
    view = empty_table(
        title,
        *("prompt", "plain\ntok/s", "drafts\ntok/s", "over\nplain", "low-high", "whole", "tau"),
        *("depth", "first\ntoken", "K/V\nMB", "same"),
    )
    for row in rows:
        view.add_row(
            str(row.prompt_len),
            three_digits(row.plain.decode_tokens_per_second),
            three_digits(row.drafted.decode_tokens_per_second),
            *spread_cells(row.decode_speedup),
            spread_cells(row.total_speedup_spread)[1],
            three_digits(row.acceptance_length),
            f"{row.mean_depth:.1f}",
            three_digits(row.drafted_first_token_seconds),
            f"{three_digits(row.kv_bytes.target / _MB)}+{three_digits(row.kv_bytes.draft / _MB)}",
            f"{row.num_identical}/{row.num_passages}",
        )
    return view


def clipped_lines(rows: Sequence[ContextFigures]) -> list[str]:
    """One line for each length that the model's context could not hold."""
    return [
        f"{row.requested_len} tokens do not fit the context with the output; the prompt has "
        f"{row.prompt_len}"
        for row in rows
        if row.prompt_len < row.requested_len
    ]
