"""The same requests at several concurrencies, plain and drafted."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

from blockdraft.bench.config import ConcurrencyConfig
from blockdraft.bench.decode import (
    ADAPTIVE,
    PLAIN,
    Decoder,
    Run,
    Way,
    check_drafts,
    fixed,
    samples_of,
)
from blockdraft.bench.ledger.accounts import Account, merge_totals
from blockdraft.bench.load.repeats import OnRepeat, RepeatJournal, encode_named, measure_repeats
from blockdraft.bench.measures import (
    MEASURES,
    OUTPUT_MEASURES,
    Measures,
    Spread,
    defined,
    measures_of,
    ratios,
    spread_of,
    total_acceptance,
    without_loops,
)
from blockdraft.bench.workload import BenchPrompt, mixed_prompts
from blockdraft.core.grouping import grouped
from blockdraft.llm import LLM
from blockdraft.measure.ledger import make_ledger
from blockdraft.measure.measuring import measured

CONCURRENCY_DEFINITIONS = {
    "concurrency": "most concurrent requests; four times as many are sent together, then the next "
    "configuration takes its turn. Every point runs the first of the same requests to completion",
    "tokens_per_second": f"{MEASURES['tokens_per_second_in_total']}; over the repeats: median, "
    "lowest, highest",
    "tokens_per_second_per_user": f"{MEASURES['tokens_per_second_per_user']}; over the repeats: "
    "median, lowest, highest",
    "speedup_over_plain": "tokens_per_second divided by that of plain decoding in the same repeat; "
    "over the repeats: median, lowest, highest",
    "mean_decoding": "requests past their first token, on average over the wall time: the "
    "concurrency that remains after prefill and the drain at the end of every turn",
    **defined("acceptance_length", "mean_depth", "num_passes_of_depth", "mean_drafted"),
    "num_identical": "outputs that equal those of the first plain run of the same requests",
    "over_best": "adaptive divided by the faster of the other configurations at that point, by "
    "medians; per repeat: median, lowest, highest",
    "keeps_up": "the median of over_best is at least 0.97",
    "measures": "of all requests and repeats",
    **defined(*OUTPUT_MEASURES),
}

LEAST_OVER_BEST = 0.97
"""Adaptive drafting is to be within 3 % of the best configuration that does not adapt."""


@dataclass(frozen=True, slots=True)
class PointRun:
    """One configuration at one point, once.

    num_identical: outputs equal to those of the reference. prompts: the name of each request's.
    """

    concurrency: int
    way: Way
    run: Run
    num_identical: int
    prompts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PointFigures:
    """One configuration at one point, over the repeats; see CONCURRENCY_DEFINITIONS."""

    concurrency: int
    way: str
    tokens_per_second: Spread
    tokens_per_second_per_user: Spread
    speedup_over_plain: Spread
    mean_decoding: float
    acceptance_length: float
    acceptance_rate: float
    mean_depth: float
    num_passes_of_depth: dict[int, int]
    mean_drafted: float
    num_outputs: int
    num_identical: int
    measures: Measures
    without_loops: Measures | None


@dataclass(frozen=True, slots=True)
class KeepingUp:
    """Adaptive drafting against the best other one at one point; see CONCURRENCY_DEFINITIONS."""

    concurrency: int
    best: str
    over_best: Spread

    @property
    def keeps_up(self) -> bool:
        """True if adaptive drafting is nowhere near slower."""
        return self.over_best.median >= LEAST_OVER_BEST


def ways_of(config: ConcurrencyConfig) -> list[Way]:
    """The configurations that are compared."""
    return [PLAIN, fixed(config.num_draft_tokens), ADAPTIVE]


def measure_concurrency(
    llm: LLM,
    prompts: Sequence[BenchPrompt],
    config: ConcurrencyConfig,
    on_progress: OnRepeat = lambda repeat: None,
    journal: RepeatJournal | None = None,
) -> list[PointRun]:
    """Measure every point, configurations in turns, after warm-ups; not what the journal holds.

    Raises:
        ConfigError: there is no drafter.
        RequestError: a prompt cannot be decoded; known before anything is measured.
    """
    check_drafts(llm)
    chosen = mixed_prompts(prompts, config.requests_per_point)
    asked = encode_named(llm, chosen, config.params)
    journal = RepeatJournal() if journal is None else journal
    decoder, ways = Decoder(llm), ways_of(config)
    sides = [(decoder, way) for way in ways]
    reference: list[tuple[int, ...]] = []
    done: list[PointRun] = []
    with measured(llm.engine, llm.device) if config.ledger else nullcontext():
        for concurrency in config.concurrency:
            own = asked[: config.requests_at(concurrency)]
            for repeat in measure_repeats(
                journal, sides, own, config.params, concurrency, config.repeats, on_progress
            ):
                reference += repeat.runs[PLAIN.name].outputs[len(reference) :]
                for way in ways:
                    run = repeat.runs[way.name]
                    num_identical = run.num_equal(reference)
                    done.append(PointRun(concurrency, way, run, num_identical, repeat.prompts))
    return done


def point_figures(runs: Sequence[PointRun]) -> list[PointFigures]:
    """Figures of each point and configuration, in the order of measurement."""
    points = _by_point(runs)
    return [_figures(group, ways[PLAIN]) for ways in points.values() for group in ways.values()]


def keeping_up(runs: Sequence[PointRun]) -> list[KeepingUp]:
    """How adaptive drafting does against the best other configuration, point by point."""
    rows = []
    for concurrency, ways in _by_point(runs).items():
        speeds = {way: [m.run.tokens_per_second for m in group] for way, group in ways.items()}
        adaptive = speeds.pop(ADAPTIVE)
        best = max(speeds, key=lambda way: median(speeds[way]))
        rows.append(KeepingUp(concurrency, best.name, ratios(adaptive, speeds[best])))
    return rows


def accounts_of(llm: LLM, runs: Sequence[PointRun]) -> list[Account]:
    """One for each point and configuration, over the repeats, measured with a ledger."""
    accounts = []
    for concurrency, ways in _by_point(runs).items():
        totals = {way: merge_totals(m.run.phases for m in group) for way, group in ways.items()}
        plain = make_ledger(totals.pop(PLAIN), llm.engine)
        accounts.append(Account(f"concurrency {concurrency}, {PLAIN.name}", plain))
        accounts += [
            Account(f"concurrency {concurrency}, {way.name}", make_ledger(whole, llm.engine), plain)
            for way, whole in totals.items()
        ]
    return accounts


def _by_point(runs: Sequence[PointRun]) -> dict[int, dict[Way, list[PointRun]]]:
    points = grouped(runs, lambda run: run.concurrency)
    return {point: grouped(own, lambda run: run.way) for point, own in points.items()}


def _figures(group: Sequence[PointRun], plain: Sequence[PointRun]) -> PointFigures:
    """Figures of one configuration at one point; both lists have one run a repeat."""
    runs, plain_runs = ([measured.run for measured in own] for own in (group, plain))
    samples, plain_samples = samples_of(runs), samples_of(plain_runs)
    prompts = [prompt for measured in group for prompt in measured.prompts]
    acceptance = total_acceptance(samples)
    is_alone = group[0].concurrency == 1
    return PointFigures(
        concurrency=group[0].concurrency,
        way=group[0].way.name,
        tokens_per_second=spread_of([run.tokens_per_second for run in runs]),
        tokens_per_second_per_user=spread_of([run.tokens_per_second_per_user for run in runs]),
        speedup_over_plain=ratios(
            [run.tokens_per_second for run in runs], [run.tokens_per_second for run in plain_runs]
        ),
        mean_decoding=sum(s.decode_seconds for s in samples) / sum(r.wall_seconds for r in runs),
        acceptance_length=acceptance.acceptance_length,
        acceptance_rate=acceptance.acceptance_rate,
        mean_depth=acceptance.mean_depth,
        num_passes_of_depth=acceptance.num_passes_of_depth,
        mean_drafted=acceptance.mean_drafted,
        num_outputs=len(samples),
        num_identical=sum(measured.num_identical for measured in group),
        measures=measures_of(samples, plain_samples, prompts, with_bands=is_alone),
        without_loops=without_loops(samples, plain_samples, prompts, with_bands=is_alone),
    )
