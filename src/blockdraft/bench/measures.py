"""What is measured of decoding. Each measure is defined here, once.

An output is the tokens of one request and the times they took (TimedOutput). In the formulas n is
the number of its tokens, T the seconds from the request to its last token, D the seconds from its
first token to its last, Q the seconds that it waited before its first step. A sum runs over all
outputs of a row.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np

from blockdraft.bench.timed_output import TimedOutput
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.text.kinds import loops

MEASURES = {
    "tokens_per_second": "all output tokens divided by all seconds, from request to last token, "
    "prefill included",
    "decode_tokens_per_second": "output tokens after the first of each output, divided by the "
    "seconds since that token",
    "tokens_per_second_in_total": "output tokens of all requests divided by the wall time, "
    "prefill and the drain at the end of every turn included",
    "tokens_per_second_per_user": "median over requests: tokens after the first, divided by the "
    "seconds since it; requests of a single token left out",
    "speedup": "tokens_per_second divided by the baseline's for the same prompts, end to end",
    "decode_speedup": "decode_tokens_per_second divided by the baseline's for the same prompts",
    "band": "95 % bootstrap interval: prompts are resampled with replacement, each with all its "
    "turns and the outputs of both sides, 2000 times with a fixed seed; too narrow with few "
    "prompts, and blind to changes from run to run; none for a single prompt, nor where a fixed "
    "number of requests run concurrently, because they share steps",
    "acceptance_length": "tau: tokens committed per target pass after prefill, bonus included",
    "tau_micro": "the same as acceptance_length: tokens of all outputs divided by passes of all "
    "outputs",
    "tau_macro": "mean over outputs of the tau of each",
    "acceptance_rate": "accepted draft tokens divided by draft tokens",
    "per_position": "by distance from the anchor: passes that accepted a draft token there, "
    "divided by passes that had one there",
    "per_node": "by distance from the anchor and rank among the siblings, from 0, as "
    "'distance,rank': accepted draft tokens divided by draft tokens",
    "mean_depth": "longest drafted path of a target pass after prefill, on average, as really "
    "drafted; what adaptive drafting has learned carries over from run to run",
    "num_passes_of_depth": "target passes after prefill, by their longest drafted path",
    "mean_drafted": "draft tokens per target pass after prefill, all branches of a tree included",
    "first_token_seconds": "TTFT: from the request to its first token, queueing and prefill "
    "included",
    "prompt_seconds": "first_token_seconds without the wait for the first step",
    "seconds_per_token": "TPOT: seconds since the first token, divided by the tokens after it",
    "largest_gap": "longest time between two consecutive tokens; tokens of one pass arrive "
    "together",
    "share_equal": "share of the outputs with exactly the tokens of the baseline",
    "num_looping": "outputs with under 70 % distinct 8-grams; they are easy to draft",
    "without_loops": "the same measures without the outputs that loop, on both sides",
    "memory": "peak memory of the process, and on a GPU the peak of what torch took",
}

OUTPUT_MEASURES = (
    *("speedup", "decode_speedup", "band", "tau_micro", "tau_macro", "acceptance_rate"),
    *("per_position", "per_node", "first_token_seconds", "prompt_seconds", "seconds_per_token"),
    *("largest_gap", "share_equal", "num_looping", "without_loops", "memory"),
)
"""What a row says of its outputs."""

NUM_RESAMPLES = 2000
SEED = 0
CONFIDENCE = 0.95


def defined(*names: str) -> dict[str, str]:
    """The definitions of some measures, for a result."""
    return {name: MEASURES[name] for name in names}


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure that was measured several times."""

    median: float
    low: float
    high: float


def spread_of(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one value."""
    return Spread(median(values), min(values), max(values))


def ratios(values: Sequence[float], others: Sequence[float]) -> Spread:
    """One over the other, repeat by repeat."""
    return spread_of([value / other for value, other in zip(values, others, strict=True)])


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Over outputs, and their mean; percentiles are linear between neighbors."""

    mean: float
    p50: float
    p95: float
    p99: float


def percentiles_of(values: Sequence[float]) -> Percentiles | None:
    """Of any values; None without one."""
    if not values:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Percentiles(fmean(values), p50, p95, p99)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one configuration, over all prompts."""

    tokens_per_second: float
    decode_tokens_per_second: float


def rate_of(samples: Sequence[TimedOutput]) -> Rate:
    """Over at least one output: sum n / sum T, and sum (n - 1) / sum D."""
    decode_seconds = sum(sample.decode_seconds for sample in samples)
    num_later = sum(len(sample.token_ids) - 1 for sample in samples)
    total_seconds = sum(sample.total_seconds for sample in samples)
    return Rate(
        tokens_per_second=sum(len(sample.token_ids) for sample in samples) / total_seconds,
        decode_tokens_per_second=num_later / decode_seconds if decode_seconds else 0.0,
    )


@dataclass(frozen=True, slots=True)
class Speedup:
    """How many times as fast as the baseline, and the ends of its band, if there is one."""

    value: float
    baseline: str
    low: float | None
    high: float | None
    num_prompts: int


def band_words(low: float | None, high: float | None) -> str:
    """The ends of a band, for people."""
    if low is None or high is None:
        return "one prompt, no spread"
    return f"95 % of resamples {low:.2f}-{high:.2f}"


def speedup_of(
    samples: Sequence[TimedOutput],
    baseline_samples: Sequence[TimedOutput],
    baseline: str,
    prompts: Sequence[Hashable] | None = None,
    *,
    decode_only: bool = False,
    with_band: bool = True,
) -> Speedup | None:
    """Both sides have the same prompts in the same order, at least one.

    (sum n / sum T) over the same of the baseline, or with `decode_only` (sum (n - 1) / sum D); None
    if a side has no seconds, as with single tokens.

    Args:
        prompts: the prompt of each output, for the band; None if each has another. Outputs of one
            prompt tell the same thing again, whatever their number, and the turns of a conversation
            hang together.
        with_band: False for requests that ran together. What slows a step slows all of them alike.
    """
    sides = [
        np.array([_work(sample, decode_only) for sample in side], dtype=np.float64)
        for side in (samples, baseline_samples)
    ]
    # Columns: tokens and seconds of this side, tokens and seconds of the baseline.
    rows = np.concatenate(sides, axis=1)
    if not (rows.sum(axis=0) > 0).all():
        return None
    value = float(_ratio(rows.sum(axis=0)[None])[0])
    if prompts is not None:
        rows = summed_by_prompt(rows, prompts)
    if len(rows) < 2 or not with_band:
        return Speedup(value, baseline, None, None, len(rows))
    low, high = bootstrap_band(rows)
    return Speedup(value, baseline, low, high, len(rows))


def bootstrap_band(rows: np.ndarray) -> tuple[float, float]:
    """Of the ratio (column 0 / column 1) / (column 2 / column 3) of sums over rows.

    Args:
        rows: [prompts, 4]. A prompt's two sides stay together: they are paired (Efron and
            Tibshirani, An Introduction to the Bootstrap, percentile method).
    """
    generator = np.random.default_rng(SEED)
    share = np.full(len(rows), 1 / len(rows))
    sums = generator.multinomial(len(rows), share, size=NUM_RESAMPLES) @ rows
    # Drawn may be only prompts without any seconds.
    ratio = _ratio(sums[(sums > 0).all(axis=1)])
    low, high = np.quantile(ratio, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def summed_by_prompt(rows: np.ndarray, prompts: Sequence[Hashable]) -> np.ndarray:
    """One row for each prompt, from rows of outputs and the prompt of each."""
    places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
    sums = np.zeros((len(places), rows.shape[1]))
    for prompt, row in zip(prompts, rows, strict=True):
        sums[places[prompt]] += row
    return sums


def _ratio(sums: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = (sums[:, 0] / sums[:, 1]) / (sums[:, 2] / sums[:, 3])
    return ratio


def _work(sample: TimedOutput, decode_only: bool) -> tuple[float, float]:
    if decode_only:
        return len(sample.token_ids) - 1, sample.decode_seconds
    return len(sample.token_ids), sample.total_seconds


def total_acceptance(samples: Iterable[TimedOutput]) -> AcceptanceStats:
    """Counts over several outputs."""
    total = AcceptanceStats()
    for sample in samples:
        total.add(sample.acceptance)
    return total


def tau_macro(samples: Iterable[TimedOutput]) -> float:
    """Mean over outputs of tokens / passes; outputs without a pass do not count, 0 without any."""
    taus = [s.acceptance.acceptance_length for s in samples if s.acceptance.num_passes]
    return fmean(taus) if taus else 0.0


@dataclass(frozen=True, slots=True)
class Measures:
    """One configuration, over the outputs of a row; see MEASURES."""

    num_outputs: int
    num_tokens: int
    num_looping: int
    tokens_per_second: float
    decode_tokens_per_second: float
    tau_micro: float
    tau_macro: float
    acceptance_rate: float
    per_position: list[float]
    per_node: dict[str, float]
    first_token_seconds: Percentiles
    prompt_seconds: Percentiles
    seconds_per_token: Percentiles | None
    largest_gap: Percentiles | None
    share_equal: float | None
    speedup: Speedup | None
    decode_speedup: Speedup | None


def measures_of(
    samples: Sequence[TimedOutput],
    plain_samples: Sequence[TimedOutput] | None = None,
    prompts: Sequence[Hashable] | None = None,
    *,
    with_bands: bool = True,
) -> Measures:
    """Over at least one output; plain decoding has the same prompts in the same order.

    `prompts` and `with_bands` as of `speedup_of`.
    """
    rate, acceptance = rate_of(samples), total_acceptance(samples)
    first = percentiles_of([sample.first_token_seconds for sample in samples])
    prompt = percentiles_of([sample.prompt_seconds for sample in samples])
    assert first is not None
    assert prompt is not None
    equal, speedup, decode = None, None, None
    if plain_samples is not None:
        pairs = zip(samples, plain_samples, strict=True)
        equal = fmean(one.token_ids == other.token_ids for one, other in pairs)
        over_plain = partial(
            speedup_of, samples, plain_samples, "plain", prompts, with_band=with_bands
        )
        speedup, decode = over_plain(), over_plain(decode_only=True)
    return Measures(
        num_outputs=len(samples),
        num_tokens=sum(len(sample.token_ids) for sample in samples),
        num_looping=sum(loops(sample.token_ids) for sample in samples),
        tokens_per_second=rate.tokens_per_second,
        decode_tokens_per_second=rate.decode_tokens_per_second,
        tau_micro=acceptance.acceptance_length,
        tau_macro=tau_macro(samples),
        acceptance_rate=acceptance.acceptance_rate,
        per_position=acceptance.per_position,
        per_node={f"{depth},{rank}": share for (depth, rank), share in acceptance.per_node.items()},
        first_token_seconds=first,
        prompt_seconds=prompt,
        seconds_per_token=percentiles_of(
            [s.decode_seconds / (len(s.token_ids) - 1) for s in samples if len(s.token_ids) > 1]
        ),
        largest_gap=percentiles_of([s.largest_gap for s in samples if s.largest_gap is not None]),
        share_equal=equal,
        speedup=speedup,
        decode_speedup=decode,
    )


def without_loops(
    samples: Sequence[TimedOutput],
    plain_samples: Sequence[TimedOutput],
    prompts: Sequence[Hashable],
    *,
    with_bands: bool = True,
) -> Measures | None:
    """The measures of the outputs that do not loop, each beside plain decoding; None if all do.

    `prompts` and `with_bands` as of `speedup_of`.
    """
    rows = [
        row
        for row in zip(samples, plain_samples, prompts, strict=True)
        if not loops(row[0].token_ids)
    ]
    if not rows:
        return None
    ours, theirs, asked = zip(*rows, strict=True)
    return measures_of(ours, theirs, prompts=asked, with_bands=with_bands)
