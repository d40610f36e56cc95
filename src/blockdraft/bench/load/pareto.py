"""Throughput against interactivity at growing concurrency, for each drafting configuration.

All configurations decode the same requests, in turns after a few, and their outputs are compared
with those of plain decoding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockdraft.bench.config import ParetoConfig
from blockdraft.bench.decode import (
    ADAPTIVE,
    PLAIN,
    Decoder,
    Run,
    Side,
    Way,
    check_drafts,
    samples_of,
)
from blockdraft.bench.load.curve import Curve, CurvePoint, Reading, interactivity_at, throughput_at
from blockdraft.bench.load.repeats import (
    OnRepeat,
    Repeat,
    RepeatJournal,
    encode_named,
    measure_repeats,
)
from blockdraft.bench.measures import (
    MEASURES,
    OUTPUT_MEASURES,
    Measures,
    Spread,
    defined,
    measures_of,
    ratios,
    spread_of,
    without_loops,
)
from blockdraft.bench.workload import BenchPrompt, mixed_prompts
from blockdraft.core.grouping import grouped
from blockdraft.hub.catalog import display_name
from blockdraft.llm import LLM
from blockdraft.speculate.drafters.none import NoDrafter

PARETO_DEFINITIONS = {
    "points": "each configuration at each number of concurrent requests; when a request ends, the "
    "next one starts; the configurations take turns after every few requests",
    "throughput": f"{MEASURES['tokens_per_second_in_total']}; over the repeats: median, lowest, "
    "highest",
    "interactivity": f"{MEASURES['tokens_per_second_per_user']}; over the repeats: median, lowest, "
    "highest",
    "speedup_over_plain": "throughput divided by that of plain decoding with as many concurrent "
    "requests, in the same repeat; over the repeats: median, lowest, highest",
    "readings": "a configuration's curve at the interactivity (throughput) of plain decoding with "
    "so many concurrent requests, divided by that of plain decoding at the same level; both are "
    "interpolated linearly between measured points, and where a curve has several values, its "
    "largest counts; per repeat: median, lowest, highest. Nothing is extrapolated",
    "mean_running": "requests past their first step, on average over the wall time: the "
    "concurrency that remains after the drain at the end of every turn",
    "num_identical": "outputs that equal those of the first plain run at the first point",
    **defined(*OUTPUT_MEASURES),
}


@dataclass(frozen=True, slots=True)
class ParetoPoint:
    """One configuration at one concurrency; see PARETO_DEFINITIONS."""

    way: str
    concurrency: int
    throughput: Spread
    interactivity: Spread
    speedup_over_plain: Spread
    mean_running: float
    num_outputs: int
    num_identical: int
    measures: Measures
    without_loops: Measures | None


@dataclass(frozen=True, slots=True)
class CurveReading:
    """A configuration at the level of plain decoding with this concurrency.

    `ratio` is over plain decoding; None if the level is `outside` of what was measured of it,
    in any repeat, or if all of plain decoding's outputs are single tokens, which have no speed.
    """

    way: str
    plain_concurrency: int
    level: float
    ratio: Spread | None
    outside: str | None


class ParetoBench:
    """Measures plain decoding, and drafting by each of some LLMs with the same target.

    Args:
        llms: by the name of their configuration. The first decodes plainly too.
        parts: also measure each kind of drafter of the first LLM alone.
    """

    def __init__(self, llms: Mapping[str, LLM], *, parts: bool = False) -> None:
        for llm in llms.values():
            check_drafts(llm)
        self.llm = next(iter(llms.values()))
        self.sides: list[Side] = [(Decoder(self.llm), PLAIN)]
        self.sides += [(Decoder(llm), replace(ADAPTIVE, name=name)) for name, llm in llms.items()]
        kinds = [drafter.kind for drafter in self.llm.engine.proposer.drafters]
        kinds = [kind for kind in kinds if kind != NoDrafter.kind]
        if parts and len(kinds) > 1:
            # Each learns for itself.
            self.sides += [
                (Decoder(self.llm), Way(f"{kind} alone", "adaptive", (kind,))) for kind in kinds
            ]

    @property
    def ways(self) -> list[Way]:
        """What is compared, plain decoding first."""
        return [way for _, way in self.sides]

    def run(
        self,
        prompts: Sequence[BenchPrompt],
        config: ParetoConfig,
        journal: RepeatJournal,
        on_progress: OnRepeat = lambda repeat: None,
    ) -> list[Repeat]:
        """Measure what the journal lacks; returns all, in order.

        Raises:
            RequestError: a prompt cannot be decoded; known before anything is measured.
        """
        chosen = mixed_prompts(prompts, config.requests_per_point)
        asked = encode_named(self.llm, chosen, config.params)
        return [
            repeat
            for concurrency in config.concurrency
            for repeat in measure_repeats(
                *(journal, self.sides, asked, config.params),
                *(concurrency, config.repeats, on_progress),
            )
        ]


def names_of(folders: Sequence[Path | None]) -> list[str]:
    """Names of configurations by their drafters: as short as tells them apart.

    Without a drafter what is looked up is drafted.
    """
    drafters = ["lookup" if folder is None else str(folder) for folder in folders]
    short = [display_name(drafter) for drafter in drafters]
    return short if len(set(short)) == len(short) else [str(Path(d)) for d in drafters]


def pareto_points(repeats: Sequence[Repeat]) -> list[ParetoPoint]:
    """By configuration, and of each by concurrency."""
    reference = repeats[0].runs[PLAIN.name].outputs
    groups = grouped(repeats, lambda repeat: repeat.concurrency)
    return [
        _point(way, concurrency, group, reference)
        for way in repeats[0].runs
        for concurrency, group in groups.items()
    ]


def _point(
    way: str, concurrency: int, group: Sequence[Repeat], reference: Sequence[tuple[int, ...]]
) -> ParetoPoint:
    runs = [repeat.runs[way] for repeat in group]
    plain = [repeat.runs[PLAIN.name] for repeat in group]
    samples, plain_samples = samples_of(runs), samples_of(plain)
    prompts = [prompt for repeat in group for prompt in repeat.prompts]
    is_alone = concurrency == 1
    return ParetoPoint(
        way=way,
        concurrency=concurrency,
        throughput=spread_of([run.tokens_per_second for run in runs]),
        interactivity=spread_of([run.tokens_per_second_per_user for run in runs]),
        speedup_over_plain=ratios(
            [run.tokens_per_second for run in runs], [run.tokens_per_second for run in plain]
        ),
        mean_running=sum(s.total_seconds - s.queue_seconds for s in samples)
        / sum(run.wall_seconds for run in runs),
        num_outputs=len(samples),
        num_identical=sum(run.num_equal(reference) for run in runs),
        measures=measures_of(samples, plain_samples, prompts, with_bands=is_alone),
        without_loops=without_loops(samples, plain_samples, prompts, with_bands=is_alone),
    )


def readings(repeats: Sequence[Repeat]) -> tuple[list[CurveReading], list[CurveReading]]:
    """Throughput at equal interactivity, and interactivity at equal throughput."""
    return (
        list(_read(repeats, throughput_at, lambda point: point.interactivity)),
        list(_read(repeats, interactivity_at, lambda point: point.throughput)),
    )


def _read(
    repeats: Sequence[Repeat],
    read: Callable[[Curve, float], Reading],
    level_of: Callable[[CurvePoint], float],
) -> Iterator[CurveReading]:
    curves = list(grouped(repeats, lambda repeat: repeat.number).values())
    plain_curves = [_curve(points, PLAIN.name) for points in curves]
    for way in repeats[0].runs:
        if way == PLAIN.name:
            continue
        for index, point in enumerate(curves[0]):
            levels = [level_of(plain[index]) for plain in plain_curves]
            found = _read_all(read, [_curve(points, way) for points in curves], levels)
            # Its best there, too: the point itself may lie below its curve, as where two requests
            # at once slow nobody down.
            plain = [one.value for one in _read_all(read, plain_curves, levels) if one.value]
            outside = sorted({one.outside for one in found if one.outside is not None})
            values = [one.value for one in found if one.value is not None]
            yield CurveReading(
                way=way,
                plain_concurrency=point.concurrency,
                level=spread_of(levels).median,
                ratio=None if outside or len(plain) < len(levels) else ratios(values, plain),
                outside=" and ".join(outside) or None,
            )


def _read_all(
    read: Callable[[Curve, float], Reading], curves: Sequence[Curve], levels: Sequence[float]
) -> list[Reading]:
    return [read(curve, level) for curve, level in zip(curves, levels, strict=True)]


def _curve(points: Sequence[Repeat], way: str) -> Curve:
    """Of one repeat, by concurrency."""
    return [_curve_point(point.runs[way]) for point in points]


def _curve_point(run: Run) -> CurvePoint:
    return CurvePoint(run.tokens_per_second_per_user, run.tokens_per_second)
