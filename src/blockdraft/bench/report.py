"""Measurements for people and for machines."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from blockdraft.bench.config import SpeedConfig
from blockdraft.bench.figures import ALL, DEFINITIONS, WITHOUT_LOOPS, Figures, Spread, groups_of
from blockdraft.bench.ledger import Account, describe_accounts, merge_totals
from blockdraft.bench.speed import Measurement
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.llm import LLM
from blockdraft.measure.ledger import make_ledger
from blockdraft.measure.setting import describe_setting

Runs = Sequence[tuple[SpeedConfig, Sequence[Measurement]]]


def json_report(llm: LLM, runs: Runs) -> dict[str, Any]:
    """Everything needed to judge and to repeat a result."""
    return {
        **describe_setting(llm),
        "definitions": DEFINITIONS,
        "runs": [_run(llm, config, measurements) for config, measurements in runs],
    }


def _run(llm: LLM, config: SpeedConfig, measurements: Sequence[Measurement]) -> dict[str, Any]:
    described = {
        "config": asdict(config),
        "figures": {name: asdict(row) for name, row in groups_of(measurements).items()},
        "prompts": [_prompt(measurement) for measurement in measurements],
    }
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
        "category": measurement.prompt.category,
        "identical": measurement.identical,
        "loops": measurement.loops,
        **{name: describe_output(sample) for name, sample in ways.items() if sample is not None},
    }


def describe_output(sample: TimedOutput) -> dict[str, Any]:
    """One output, for JSON."""
    described = asdict(sample)
    del described["acceptance"]
    described["tokens_per_second"] = sample.tokens_per_second
    if sample.acceptance.drafted:
        described |= sample.acceptance.to_dict()
    return described


LEGEND = """\
tok/s: all tokens over all seconds. speed-up: drafted over the other. quartiles:
of the speed-up over plain, prompt by prompt. tau: tokens per target pass. same
tokens: drafted output equals plain output. loops: outputs that repeat
themselves, which are easy to draft."""


def table(title: str, groups: Mapping[str, Figures]) -> Table:
    """One row per group; fits 80 columns."""
    with_stock = groups[ALL].transformers is not None
    view = empty_table(
        title,
        *("", "drafted\ntok/s", "plain\ntok/s"),
        *(["trans-\nformers\ntok/s"] if with_stock else []),
        *("speed-up\nover\nplain", "quartiles"),
        *(["over\ntrans-\nformers"] if with_stock else []),
        *("tau", "same\ntokens", "loops"),
    )
    for name, row in groups.items():
        if name == ALL:
            view.add_section()
        if name != WITHOUT_LOOPS or groups[ALL].num_looping:
            view.add_row(name, *_cells(row))
    return view


def _cells(row: Figures) -> list[str]:
    stock, over_stock = row.transformers, row.speedup_over_transformers
    low, _, high = row.per_prompt_speedup
    return [
        f"{row.drafted.tokens_per_second:.1f}",
        f"{row.plain.tokens_per_second:.1f}",
        *([] if stock is None else [f"{stock.tokens_per_second:.1f}"]),
        f"{row.speedup_over_plain:.2f}",
        f"{low:.2f}-{high:.2f}",
        *([] if over_stock is None else [f"{over_stock:.2f}"]),
        f"{row.acceptance_length:.2f}",
        f"{row.num_identical}/{row.num_prompts}",
        str(row.num_looping),
    ]


def empty_table(title: str, *headings: str) -> Table:
    """A table without rows; a column without a heading holds names, the others numbers."""
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
    for heading in headings:
        view.add_column(heading, justify="right" if heading else "left")
    return view


def spread_cells(spread: Spread) -> tuple[str, str]:
    """Median, and lowest to highest."""
    return (
        three_digits(spread.median),
        f"{three_digits(spread.low)}-{three_digits(spread.high)}",
    )


def three_digits(value: float) -> str:
    """As many decimals as leave three digits, so that a column fits slow and fast machines."""
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"
