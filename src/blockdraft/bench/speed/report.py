"""Measurements for people and for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.ledger.accounts import Account, describe_accounts, merge_totals
from blockdraft.bench.measures import Speedup, speedup_of
from blockdraft.bench.outside.figures import (
    OUTSIDE_DEFINITIONS,
    outside_figures,
    outside_outputs,
)
from blockdraft.bench.outside.others import OtherEngine
from blockdraft.bench.result import describe_result
from blockdraft.bench.scores.scores import SCORE_DEFINITIONS, scores_of
from blockdraft.bench.speed.bench import Measurement
from blockdraft.bench.speed.figures import ALL, DEFINITIONS, WITHOUT_LOOPS, Figures, groups_of
from blockdraft.bench.speed.lengths import LENGTH_DEFINITIONS, BreakEvenLength, break_even_length
from blockdraft.bench.tables import empty_table, tau_words, three_digits
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.llm import LLM
from blockdraft.measure.ledger import make_ledger

Runs = Sequence[tuple[SpeedConfig, Sequence[Measurement]]]


def json_report(
    llm: LLM, runs: Runs, others: Sequence[OtherEngine] = (), num_resumed: int = 0
) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result; `num_resumed` as of `describe_result`."""
    definitions = DEFINITIONS | (OUTSIDE_DEFINITIONS if others else {})
    if any(config.score for config, _ in runs):
        definitions |= SCORE_DEFINITIONS
    lengths = length_of(runs)
    if lengths is not None:
        definitions |= LENGTH_DEFINITIONS
    return {
        **describe_result("speed", llm, definitions, num_resumed),
        **({} if lengths is None else {"break_even_length": asdict(lengths)}),
        "runs": [_run(llm, config, measurements, others) for config, measurements in runs],
    }


def length_of(runs: Runs) -> BreakEvenLength | None:
    """From which length on drafting saves time; None for runs of no fixed lengths."""
    if not all(config.ignore_eos for config, _ in runs):
        return None
    found = {
        config.max_tokens: speedup_of(
            [m.drafted for m in rows],
            [m.plain for m in rows],
            "plain",
            [m.conversation for m in rows],
        )
        for config, rows in runs
    }
    return break_even_length({n: None if one is None else asdict(one) for n, one in found.items()})


def _run(
    llm: LLM,
    config: SpeedConfig,
    measurements: Sequence[Measurement],
    others: Sequence[OtherEngine],
) -> dict[str, Any]:
    described = {
        "config": asdict(config),
        "figures": {name: asdict(row) for name, row in groups_of(measurements).items()},
        "prompts": [_prompt(measurement) for measurement in measurements],
    }
    if others:
        described["outside"] = {
            other.name: asdict(outside_figures(other, measurements)) for other in others
        }
    if config.score:
        scores = scores_of(measurements, llm.tokenizer.decode, config.max_tokens)
        described["scores"] = {name: asdict(score) for name, score in scores.items()}
    if config.ledger:
        described["ledger"] = describe_accounts(accounts_of(llm, measurements))
    return described


def accounts_of(llm: LLM, measurements: Sequence[Measurement]) -> list[Account]:
    """Drafted and plain decoding of all prompts together, measured with a ledger."""
    plain, drafted = (
        make_ledger(merge_totals(m.phases[way] for m in measurements), llm.engine)
        for way in ("plain", "drafted")
    )
    return [Account("drafted", drafted, plain), Account("plain", plain)]


def _prompt(measurement: Measurement) -> dict[str, Any]:
    ways: dict[str, TimedOutput | None] = {
        "plain": measurement.plain,
        "drafted": measurement.drafted,
        "transformers": measurement.transformers,
    }
    return {
        "id": measurement.prompt.id,
        "turn": measurement.turn,
        "category": measurement.prompt.category,
        "num_tools": len(measurement.prompt.tools),
        "thinking": measurement.prompt.thinking,
        "identical": measurement.identical,
        "loops": measurement.loops,
        **{name: describe_output(sample) for name, sample in ways.items() if sample is not None},
        **({"outside": outside_outputs(measurement)} if measurement.outside else {}),
    }


def describe_output(sample: TimedOutput) -> dict[str, Any]:
    """One output, for JSON."""
    described = asdict(sample)
    del described["acceptance"]
    described["tokens_per_second"] = sample.tokens_per_second
    if sample.acceptance.num_passes:
        described |= sample.acceptance.to_dict()
    return described


LEGEND = """\
tok/s: all tokens divided by all seconds. speed-up: drafted over the other.
95 %: bootstrap interval over the prompts. tau: tokens per target pass.
same tokens: drafted output equals plain output. loops: outputs that repeat
themselves, which are easy to draft."""


def table(title: str, groups: Mapping[str, Figures]) -> Table:
    """One row per group; fits 80 columns."""
    with_stock = groups[ALL].transformers is not None
    view = empty_table(
        title,
        *("", "drafted\ntok/s", "plain\ntok/s"),
        *(["trans-\nformers\ntok/s"] if with_stock else []),
        *("speed-up\nover\nplain", "95 %"),
        *(["over trans-\nformers\n95 %"] if with_stock else []),
        *("tau", "same\ntokens", "loops"),
    )
    for name, row in groups.items():
        if name == ALL:
            view.add_section()
        if name != WITHOUT_LOOPS or groups[ALL].num_looping:
            view.add_row(name, *_cells(row))
    return view


def _cells(row: Figures) -> list[str]:
    stock = row.transformers
    return [
        f"{row.drafted.tokens_per_second:.1f}",
        f"{row.plain.tokens_per_second:.1f}",
        *([] if stock is None else [f"{stock.tokens_per_second:.1f}"]),
        f"{row.speedup_over_plain:.2f}",
        _band(row.speedup_bands["plain"]),
        *([] if stock is None else [_band(row.speedup_bands["transformers"])]),
        tau_words(row.acceptance_length),
        f"{row.num_identical}/{row.num_prompts}",
        str(row.num_looping),
    ]


def _band(speedup: Speedup | None) -> str:
    """Of a single prompt there is none, only the figure."""
    if speedup is None:
        return "-"
    if speedup.low is None or speedup.high is None:
        return f"{three_digits(speedup.value)} (one)"
    return f"{three_digits(speedup.low)}-{three_digits(speedup.high)}"
