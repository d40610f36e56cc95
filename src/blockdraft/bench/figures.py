"""Figures over many measurements. Each metric is defined here, once."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import NamedTuple

from blockdraft.bench.speed import Measurement
from blockdraft.bench.timed_output import TimedOutput
from blockdraft.measure.acceptance import AcceptanceStats

DEFINITIONS = {
    "tokens_per_second": "all output tokens over all seconds, from request to last token, the "
    "prompt's pass included",
    "decode_tokens_per_second": "output tokens after each first one over the seconds since it",
    "speedup_over_plain": "drafted tokens_per_second over that of our own plain decoding",
    "speedup_over_transformers": "drafted tokens_per_second over that of transformers' generate, "
    "stock attention",
    "per_prompt_speedup": "quartiles over prompts of drafted over plain tokens per second",
    "acceptance_length": "tau: tokens committed per target pass after the prompt's, bonus included",
    "acceptance_rate": "kept drafted tokens over drafted tokens",
    "num_identical": "prompts whose drafted tokens equal the plain ones",
    "num_equal_to_transformers": "prompts whose tokens equal transformers' (greedy only; it does "
    "not promise equal bits)",
    "num_looping": "outputs with under 70 % distinct 8-grams; they are easy to draft",
}

ALL, WITHOUT_LOOPS = "all", "no loops"
"""Names of the groups beside the categories."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was measured several times."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one way to decode, over all prompts."""

    tokens_per_second: float
    decode_tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Figures:
    """One row of a report; see DEFINITIONS."""

    num_prompts: int
    num_tokens: int
    plain: Rate
    drafted: Rate
    transformers: Rate | None
    speedup_over_plain: float
    speedup_over_transformers: float | None
    per_prompt_speedup: tuple[float, float, float]
    acceptance_length: float
    acceptance_rate: float
    num_identical: int
    num_equal_to_transformers: int | None
    num_looping: int


def figures_of(measurements: Sequence[Measurement]) -> Figures:
    """Figures over at least one measurement."""
    acceptance = AcceptanceStats()
    for measurement in measurements:
        acceptance.add(measurement.drafted.acceptance)
    plain = rate_of([m.plain for m in measurements])
    drafted = rate_of([m.drafted for m in measurements])
    over_plain = [m.drafted.tokens_per_second / m.plain.tokens_per_second for m in measurements]
    stock = _stock_figures(measurements, drafted)
    return Figures(
        num_prompts=len(measurements),
        num_tokens=sum(len(m.drafted.token_ids) for m in measurements),
        plain=plain,
        drafted=drafted,
        transformers=stock.rate,
        speedup_over_plain=drafted.tokens_per_second / plain.tokens_per_second,
        speedup_over_transformers=stock.speedup,
        per_prompt_speedup=_quartiles(over_plain),
        acceptance_length=acceptance.acceptance_length,
        acceptance_rate=acceptance.acceptance_rate,
        num_identical=sum(m.identical for m in measurements),
        num_equal_to_transformers=stock.num_equal,
        num_looping=sum(m.loops for m in measurements),
    )


class _StockFigures(NamedTuple):
    rate: Rate | None = None
    speedup: float | None = None
    num_equal: int | None = None


def _stock_figures(measurements: Sequence[Measurement], drafted: Rate) -> _StockFigures:
    stock = [(m.transformers, m.plain) for m in measurements if m.transformers is not None]
    if not stock:
        return _StockFigures()
    rate = rate_of([sample for sample, _ in stock])
    num_equal = sum(sample.token_ids == plain.token_ids for sample, plain in stock)
    return _StockFigures(rate, drafted.tokens_per_second / rate.tokens_per_second, num_equal)


def groups_of(measurements: Sequence[Measurement]) -> dict[str, Figures]:
    """Figures of each category, of all, and of all without looping outputs."""
    groups: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        groups.setdefault(measurement.prompt.category, []).append(measurement)
    groups[ALL] = list(measurements)
    if straight := [m for m in measurements if not m.loops]:
        groups[WITHOUT_LOOPS] = straight
    return {name: figures_of(group) for name, group in groups.items()}


def rate_of(samples: Sequence[TimedOutput]) -> Rate:
    """Tokens per second over at least one output."""
    decode_seconds = sum(sample.decode_seconds for sample in samples)
    num_later = sum(len(sample.token_ids) - 1 for sample in samples)
    total_seconds = sum(sample.total_seconds for sample in samples)
    return Rate(
        tokens_per_second=sum(len(sample.token_ids) for sample in samples) / total_seconds,
        decode_tokens_per_second=num_later / decode_seconds if decode_seconds else 0.0,
    )


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high
