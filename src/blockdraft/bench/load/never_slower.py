"""Adaptive drafting against an engine without a drafter: the worst that drafting may cost."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.bench.config import NeverSlowerConfig
from blockdraft.bench.decode import (
    ADAPTIVE,
    PLAIN,
    Decoder,
    Run,
    check_drafts,
    samples_of,
)
from blockdraft.bench.load.repeats import OnRepeat, RepeatJournal, encode_named, measure_repeats
from blockdraft.bench.measures import MEASURES, Spread, defined, spread_of, total_acceptance
from blockdraft.bench.workload import BenchPrompt, mixed_prompts
from blockdraft.core.grouping import grouped
from blockdraft.llm import LLM

NEVER_SLOWER_DEFINITIONS = {
    "concurrency": "most concurrent requests; four times as many are sent together, then the other "
    "side takes its turn",
    "tokens_per_second": f"{MEASURES['tokens_per_second_in_total']}; over the pairs: median, "
    "lowest, highest",
    "ratio": "adaptive divided by no drafter, for each pair, in which the sides take turns: "
    "median, lowest, highest",
    "slowdown": "seconds per token with adaptive drafting divided by those without a drafter: 1 "
    "divided by the median ratio",
    "limit": "the largest allowed slowdown: 1.03, plus one second of trying in seconds_per_side",
    "holds": "slowdown is at most limit",
    "confidence": "probability that the true median of the ratio lies between lowest and highest, "
    "if pairs are independent: 1 - 2^(1 - pairs)",
    **defined("acceptance_length", "mean_depth", "num_passes_of_depth", "mean_drafted"),
    "num_identical": "outputs of both sides that equal the first ones without a drafter",
}


MOST_SLOWDOWN = 1.03
LEARNING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of both sides at one point, over the same requests in turns."""

    concurrency: int
    adaptive: Run
    no_drafter: Run
    num_identical: int

    @property
    def ratio(self) -> float:
        """Adaptive over no drafter."""
        return self.adaptive.tokens_per_second / self.no_drafter.tokens_per_second

    @property
    def num_outputs(self) -> int:
        """Outputs of both sides."""
        return len(self.adaptive.samples) + len(self.no_drafter.samples)


@dataclass(frozen=True, slots=True)
class PairFigures:
    """One point over its pairs; see NEVER_SLOWER_DEFINITIONS."""

    concurrency: int
    num_pairs: int
    seconds_per_side: float
    adaptive_tokens_per_second: Spread
    no_drafter_tokens_per_second: Spread
    ratio: Spread
    slowdown: float
    limit: float
    holds: bool
    confidence: float
    acceptance_length: float
    mean_depth: float
    num_passes_of_depth: dict[int, int]
    mean_drafted: float
    num_outputs: int
    num_identical: int


def measure_never_slower(
    llm: LLM,
    baseline: LLM,
    prompts: Sequence[BenchPrompt],
    config: NeverSlowerConfig,
    on_progress: OnRepeat = lambda repeat: None,
    journal: RepeatJournal | None = None,
) -> list[Pair]:
    """Measure every point, the sides in turns, after a warm-up of each; not what the journal holds.

    baseline: of the same target, without a drafter.

    Raises:
        ConfigError: there is no drafter.
        RequestError: a prompt cannot be decoded; known before anything is measured.
    """
    check_drafts(llm)
    chosen = mixed_prompts(prompts, config.requests_per_point)
    asked = encode_named(baseline, chosen, config.params)
    journal = RepeatJournal() if journal is None else journal
    sides = [(Decoder(baseline), PLAIN), (Decoder(llm), ADAPTIVE)]
    seconds = config.seconds / config.pairs
    reference: list[tuple[int, ...]] = []
    pairs: list[Pair] = []
    for concurrency in config.concurrency:
        own = asked[: config.requests_at(concurrency)]
        for repeat in measure_repeats(
            *(journal, sides, own, config.params, concurrency, config.pairs, on_progress),
            seconds=seconds,
        ):
            plain, adaptive = repeat.runs[PLAIN.name], repeat.runs[ADAPTIVE.name]
            reference += plain.outputs[len(reference) : len(own)]
            num_identical = sum(run.num_equal(reference[: len(own)]) for run in (plain, adaptive))
            pairs.append(Pair(concurrency, adaptive, plain, num_identical))
    return pairs


def pair_figures(pairs: Sequence[Pair]) -> list[PairFigures]:
    """Figures of each point, in the order of measurement."""
    groups = grouped(pairs, lambda pair: pair.concurrency)
    return [_figures(group) for group in groups.values()]


def _figures(group: Sequence[Pair]) -> PairFigures:
    adaptive, plain = [p.adaptive for p in group], [p.no_drafter for p in group]
    acceptance = total_acceptance(samples_of(adaptive))
    seconds = min(sum(run.wall_seconds for run in runs) for runs in (adaptive, plain))
    ratio = spread_of([pair.ratio for pair in group])
    slowdown, limit = 1 / ratio.median, MOST_SLOWDOWN + LEARNING_SECONDS / seconds
    return PairFigures(
        concurrency=group[0].concurrency,
        num_pairs=len(group),
        seconds_per_side=seconds,
        adaptive_tokens_per_second=spread_of([run.tokens_per_second for run in adaptive]),
        no_drafter_tokens_per_second=spread_of([run.tokens_per_second for run in plain]),
        ratio=ratio,
        slowdown=slowdown,
        limit=limit,
        holds=slowdown <= limit,
        confidence=1 - 2.0 ** (1 - len(group)),
        acceptance_length=acceptance.acceptance_length,
        mean_depth=acceptance.mean_depth,
        num_passes_of_depth=acceptance.num_passes_of_depth,
        mean_drafted=acceptance.mean_drafted,
        num_outputs=sum(pair.num_outputs for pair in group),
        num_identical=sum(pair.num_identical for pair in group),
    )
