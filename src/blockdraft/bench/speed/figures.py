"""The rows of `bench speed`: figures over many measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from blockdraft.bench.measures import (
    MEASURES,
    Measures,
    Rate,
    Speedup,
    defined,
    measures_of,
    rate_of,
    speedup_of,
)
from blockdraft.bench.speed.bench import Measurement
from blockdraft.core.grouping import grouped

DEFINITIONS = {
    "num_prompts": "turns of prompts; the turns of a conversation count one by one, but are "
    "resampled together for the intervals",
    "speedup_over_plain": "drafted tokens_per_second divided by that of our own plain decoding",
    "speedup_over_transformers": "drafted tokens_per_second divided by that of transformers' "
    "generate, stock attention",
    "per_prompt_speedup": "quartiles over the prompts of drafted divided by plain tokens per "
    "second",
    "speedup_bands": "speed-ups over the other configurations, end to end and from the first token "
    f"on, each with its interval: {MEASURES['band']}",
    "ways": "measures of each configuration; plain decoding is the baseline",
    "num_identical": "prompts whose drafted tokens equal the plain ones",
    "num_equal_to_transformers": "prompts whose tokens equal transformers' (greedy only; it does "
    "not promise equal bits)",
    **defined(
        *("tokens_per_second", "decode_tokens_per_second", "acceptance_length", "tau_micro"),
        *("tau_macro", "acceptance_rate", "per_position", "per_node", "first_token_seconds"),
        *("prompt_seconds", "seconds_per_token", "largest_gap", "share_equal", "num_looping"),
    ),
}

ALL, WITHOUT_LOOPS = "all", "no loops"
"""Names of the groups beside the categories."""


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
    speedup_bands: dict[str, Speedup | None]
    ways: dict[str, Measures]


def figures_of(measurements: Sequence[Measurement]) -> Figures:
    """Figures over at least one measurement."""
    plain_samples = [m.plain for m in measurements]
    drafted_samples = [m.drafted for m in measurements]
    conversations = [m.conversation for m in measurements]
    plain, drafted = rate_of(plain_samples), rate_of(drafted_samples)
    ways = {
        "plain": measures_of(plain_samples),
        "drafted": measures_of(drafted_samples, plain_samples, conversations),
    }
    bands = {"plain": ways["drafted"].speedup, "plain_decode": ways["drafted"].decode_speedup}
    over_plain = [m.drafted.tokens_per_second / m.plain.tokens_per_second for m in measurements]
    # Every prompt, or none.
    theirs = [m.transformers for m in measurements if m.transformers is not None]
    transformers, num_equal = None, None
    if theirs:
        transformers = rate_of(theirs)
        pairs = zip(theirs, plain_samples, strict=True)
        num_equal = sum(one.token_ids == other.token_ids for one, other in pairs)
        ways["transformers"] = measures_of(theirs)
        bands["transformers"] = speedup_of(drafted_samples, theirs, "transformers", conversations)
    return Figures(
        num_prompts=len(measurements),
        num_tokens=sum(len(m.drafted.token_ids) for m in measurements),
        plain=plain,
        drafted=drafted,
        transformers=transformers,
        speedup_over_plain=drafted.tokens_per_second / plain.tokens_per_second,
        speedup_over_transformers=(
            drafted.tokens_per_second / transformers.tokens_per_second if transformers else None
        ),
        per_prompt_speedup=_quartiles(over_plain),
        acceptance_length=ways["drafted"].tau_micro,
        acceptance_rate=ways["drafted"].acceptance_rate,
        num_identical=sum(m.identical for m in measurements),
        num_equal_to_transformers=num_equal,
        num_looping=sum(m.loops for m in measurements),
        speedup_bands=bands,
        ways=ways,
    )


def groups_of(measurements: Sequence[Measurement]) -> dict[str, Figures]:
    """Figures of each category, of all, and of all without looping outputs."""
    groups = grouped(measurements, lambda measurement: measurement.prompt.category)
    groups[ALL] = list(measurements)
    if without_loops := [m for m in measurements if not m.loops]:
        groups[WITHOUT_LOOPS] = without_loops
    return {name: figures_of(group) for name, group in groups.items()}


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return low, middle, high
