"""Repeats of a point, each of all configurations in turns, and the journal of those done."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from blockdraft.bench.decode import Run, Side, encode_prompts, run_in_turns
from blockdraft.bench.journal import Journal
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.request import SamplingParams
from blockdraft.llm import LLM


@dataclass(frozen=True, slots=True)
class Repeat:
    """A repeat of a point: a run of each configuration, by its name, over the same requests.

    number: from 0. prompts: the name of each request's prompt.
    """

    concurrency: int
    number: int
    prompts: tuple[str, ...]
    runs: Mapping[str, Run]


OnRepeat = Callable[[Repeat], None]


class RepeatJournal(Journal[Repeat]):
    """By concurrency and number."""

    kinds = (Repeat, Run)


def encode_named(
    llm: LLM, prompts: Sequence[BenchPrompt], params: SamplingParams
) -> list[tuple[str, list[int]]]:
    """The name of each prompt and its tokens; see `encode_prompts`."""
    encoded = encode_prompts(llm, prompts, params)
    return [(prompt.name, ids) for prompt, ids in zip(prompts, encoded, strict=True)]


def measure_repeats(
    journal: RepeatJournal,
    sides: Sequence[Side],
    prompts: Sequence[tuple[str, list[int]]],
    params: SamplingParams,
    concurrency: int,
    count: int,
    on_progress: OnRepeat,
    *,
    seconds: float = 0.0,
) -> list[Repeat]:
    """Measure what the journal lacks of a point, after a warm-up; returns all repeats, in order.

    prompts: their names and tokens. count: repeats of the point. seconds: as of `run_in_turns`.
    """
    names, encoded = tuple(name for name, _ in prompts), [ids for _, ids in prompts]
    missing = [n for n in range(count) if (concurrency, n) not in journal.done]
    for decoder, way in sides if missing else ():
        decoder.warm_up(encoded, params, way, concurrency)
    for number in missing:
        runs = run_in_turns(sides, encoded, params, concurrency, first=number, seconds=seconds)
        by_name = {way.name: run for way, run in runs.items()}
        journal.add((concurrency, number), Repeat(concurrency, number, names, by_name))
        on_progress(journal.done[concurrency, number])
    return [journal.done[concurrency, number] for number in range(count)]
