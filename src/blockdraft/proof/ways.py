"""The ways to run a case that must all give the same output, and the one they are held against."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import FinishReason
from blockdraft.core.sequence import Batch
from blockdraft.engine.completion import Chunk, Completion
from blockdraft.engine.scheduler import Scheduler
from blockdraft.llm import LLM
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.measure.measuring import compute_every_prompt, reusing
from blockdraft.proof.cases import Case
from blockdraft.proof.faults import replaced
from blockdraft.speculate.drafters.lookup import LookupDrafter
from blockdraft.speculate.verify import TokenLogprobs

TREE_SIZE = 3
"""Nodes of a tree over those of a chain."""

STEPS_OF_PREEMPTION = 4

_SHARED_TOKENS = 4096

Depth = Literal["none", "whole blocks", "trees", "adaptive"]


@dataclass(frozen=True, slots=True)
class Way:
    """How cases are run.

    num_chunks: pieces of the prompt. together: as many cases at once as may run, each begun a step
    after the one before; otherwise one by one. from_memory: what an earlier run has computed of a
    prompt is taken over. least_prompt: shorter prompts would be run as any other way runs them, and
    are not. looks_up: what is looked up in prompts and outputs is drafted too. preempts: now and
    then the youngest is sent away, as where memory is full, and computed again.
    """

    name: str
    about: str
    depth: Depth = "whole blocks"
    num_chunks: int = 1
    together: bool = False
    from_memory: bool = False
    least_prompt: int = 1
    looks_up: bool = False
    preempts: bool = False


PLAIN = Way("plain", "plain, alone, the prompt in one chunk", depth="none")
DRAFTED = Way("drafted", "drafted, alone, the prompt in one chunk")
BATCHED = Way(
    "in a batch",
    "drafted, many cases concurrently, some preempted",
    together=True,
    preempts=True,
)
CHUNKS = Way("in five chunks", "drafted, alone, chunked prefill", num_chunks=5, least_prompt=5)
FROM_MEMORY = Way(
    "prompt from the cache",
    "drafted, the start of the prompt reused from an earlier request",
    from_memory=True,
    least_prompt=PAGE_SIZE + 1,
)
TREES = Way("trees", "drafted as trees, many cases concurrently", depth="trees", together=True)
LOOKUP = Way(
    "lookup",
    "drafted as trees if the target supports them, with prompt lookup, many cases concurrently",
    depth="trees",
    together=True,
    looks_up=True,
)
ADAPTIVE = Way("adaptive", "adaptive drafting, alone", depth="adaptive")
AS_SERVED = Way(
    "as served",
    "adaptive drafting, many cases concurrently, prompts reused from each other, some preempted",
    depth="adaptive",
    together=True,
    from_memory=True,
    preempts=True,  # what resumes reuses its own tokens, drafted ones too
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Everything of one sample that must not change, and what was done for it.

    num_reused: tokens of the prompt that were taken over.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    error: str | None
    acceptance: AcceptanceStats = field(compare=False)
    num_reused: int = field(default=0, compare=False)


Output = tuple[Sample, ...]
"""The samples of one case."""

Done = Callable[[Case], None]


def ways_of(llm: LLM) -> list[Way]:
    """The ways that are held against PLAIN.

    Memory is shared by requests that run in pages only, and some targets take no trees.
    """
    trees = [TREES] if llm.engine.target.takes_trees else []
    from_memory = [FROM_MEMORY] if isinstance(llm.engine.target.memory, Pages) else []
    return [DRAFTED, BATCHED, CHUNKS, *trees, LOOKUP, *from_memory, ADAPTIVE, AS_SERVED]


def run(
    llm: LLM, cases: Sequence[Case], way: Way, done: Done = lambda case: None
) -> dict[Case, Output]:
    """Run the cases that the way is for; `done` is told each one that is finished.

    Leaves the LLM as the way has set it: depth, chunk and concurrency, no prompt reused.
    """
    cases = [case for case in cases if len(case.prompt_ids) >= way.least_prompt]
    depth = llm.engine.drafter.max_nodes
    if way.depth == "adaptive":
        llm.use_adaptive_drafting()
    elif way.depth == "trees":
        llm.use_fixed_drafting(TREE_SIZE * depth)
    else:
        llm.use_fixed_drafting()
    llm.engine.scheduler.max_running = llm.config.max_concurrency
    compute_every_prompt(llm.engine)
    with (
        reusing(llm.engine, way.from_memory),
        _looking_up(llm, way.looks_up),
        _preempting(llm.engine.scheduler, way.preempts),
    ):
        return (_run_together if way.together else _run_alone)(llm, cases, way, done)


def _run_alone(llm: LLM, cases: Sequence[Case], way: Way, done: Done) -> dict[Case, Output]:
    outputs = {}
    for case in cases:
        # The samples of a case share what a step takes of prompts.
        num_tokens = len(case.prompt_ids) * case.params.n
        llm.engine.scheduler.prefill_chunk = -(-num_tokens // way.num_chunks)
        for _ in range(2 if way.from_memory else 1):
            outputs[case] = _output(_stream(llm, case, way))
        done(case)
    return outputs


def _run_together(llm: LLM, cases: Sequence[Case], way: Way, done: Done) -> dict[Case, Output]:
    """A stream a case, read in turn: the first reading of each begins its request."""
    llm.engine.scheduler.prefill_chunk = llm.config.prefill_chunk
    streams = {case: _stream(llm, case, way) for case in cases}
    chunks: dict[Case, list[Chunk]] = {case: [] for case in cases}
    while streams:
        for case, stream in list(streams.items()):
            chunk = next(stream, None)
            if chunk is None:
                del streams[case]
                done(case)
            else:
                chunks[case].append(chunk)
    return {case: _output(found) for case, found in chunks.items()}


@contextmanager
def _looking_up(llm: LLM, wanted: bool) -> Iterator[None]:
    """Let lookup draft beside the model, also where it was not asked for."""
    proposer = llm.engine.proposer
    before = proposer.free
    if wanted:
        # For itself: it is to learn from these cases alone.
        proposer.free = (LookupDrafter(shared_tokens=_SHARED_TOKENS),)
    try:
        yield
    finally:
        proposer.free = before


@contextmanager
def _preempting(scheduler: Scheduler, wanted: bool) -> Iterator[None]:
    """Before every fourth step, preempt the youngest sequence that is past its prompt."""
    schedule, steps = scheduler.schedule, itertools.count()

    def schedule_without_one() -> Batch:
        past = [s for s in scheduler.running if s.finish_reason is None and not s.is_prefilling]
        if past and next(steps) % STEPS_OF_PREEMPTION == 0:
            scheduler.preempt(past[-1])
        return schedule()

    if not wanted:
        yield
        return
    with replaced(scheduler, "schedule", schedule_without_one):
        yield


def _stream(llm: LLM, case: Case, way: Way) -> Iterator[Chunk]:
    params = case.params if way.depth != "none" else replace(case.params, num_draft_tokens=0)
    return llm.generate(list(case.prompt_ids), params, stream=True)


def _output(chunks: Iterable[Chunk]) -> Output:
    finished = [chunk.completion for chunk in chunks if chunk.completion is not None]
    return tuple(_sample(one) for one in sorted(finished, key=lambda one: one.index))


def _sample(completion: Completion) -> Sample:
    return Sample(
        completion.token_ids,
        completion.text,
        completion.logprobs or (),
        completion.prompt_logprobs or (),
        completion.finish_reason,
        completion.error,
        completion.acceptance,
        completion.num_reused_tokens,
    )
