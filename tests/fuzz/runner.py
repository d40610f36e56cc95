"""Runs a case: every sample alone and plainly, then all of them together, drafted."""

import random
import traceback
from dataclasses import dataclass, field
from itertools import cycle

import torch

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.errors import ModelError
from blockdraft.engine.engine import Engine
from blockdraft.engine.samples import Job
from blockdraft.speculate.drafters.none import NoDrafter
from tests.fuzz.cases import LONG_OUTPUT, Asked, Case
from tests.fuzz.compare import Answer, compared, differences
from tests.fuzz.internals import (
    AnyTarget,
    Recorder,
    backend,
    check_nothing_left,
    check_pages,
    make_drafter,
    make_samples,
    num_preempted,
    num_reused,
    opened,
    stock_logits,
)
from tests.fuzz.oracle import ErringOracle
from tests.parity.lookups import changed, check_read, free_drafters

SampleId = tuple[int, int]
"""Which request, and which of its samples."""

_STEPS_PER_DEPTH = 8
_NUM_ROUNDS = 2
_TOLERANCE = {"float64": 1e-7, "float32": 2e-2}
"""Of our logits against those of transformers, which sums in another order; relative."""


@dataclass
class Tally:
    """What was run and compared."""

    num_cases: int = 0
    num_refused: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_logits: int = 0
    num_keys: int = 0
    num_drafted: int = 0
    num_rejected: int = 0
    num_branched: int = 0
    num_preempted: int = 0
    num_aborted: int = 0
    num_reused: int = 0
    num_long: int = 0
    num_against_stock: int = 0
    widths: set[int] = field(default_factory=set)

    def add(self, other: "Tally") -> None:
        """Both together."""
        for name, value in vars(other).items():
            if isinstance(value, set):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)


@dataclass
class Report:
    """What a case showed; `wrong` is empty if nothing differs, or the model was `refused`."""

    wrong: list[str] = field(default_factory=list)
    refused: str | None = None
    tally: Tally = field(default_factory=Tally)


def run_case(case: Case) -> Report:
    """Never raises: what goes wrong in the engine is what is looked for."""
    report = Report(tally=Tally(num_cases=1))
    try:
        with backend(case.model):
            _run(case, report)
    except Exception:
        report.wrong.append("raised\n" + traceback.format_exc())
    return report


def _run(case: Case, report: Report) -> None:
    try:
        with opened(case.model.build(), case.model, case.engine.num_pages) as target:
            target.check_row_invariance()
            alone = _alone(case)
            together = _together(case, target, alone, report)
    except ModelError as refused:
        report.refused = str(refused)
        report.tally.num_refused = 1
        return
    for round_index, answers in enumerate(together):
        for identity, answer in answers.items():
            said = differences(answer, alone[identity])
            report.wrong += [f"round {round_index}, sample {identity}: {one}" for one in said]
            _count(answer, report.tally)
    _hold_against_stock(case, alone, report)


def _count(answer: Answer, tally: Tally) -> None:
    counts = compared(answer)
    tally.num_samples += 1
    tally.num_tokens += len(answer.token_ids)
    tally.num_long += len(answer.token_ids) >= LONG_OUTPUT
    tally.num_logits += counts.num_logits
    tally.num_keys += counts.num_keys


class _Run:
    """An engine with its text, and the answers so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.samples = make_samples(engine)
        self.recorder = Recorder(engine)
        self.answers: dict[SampleId, Answer] = {}
        self._keys: dict[SampleId, int] = {}

    def add(
        self, index: int, asked: Asked, sample_index: int, prediction: tuple[int, ...] = ()
    ) -> int:
        """Ask for a sample; returns its key."""
        seed = asked.params.seed
        assert seed is not None
        job = Job(index, list(asked.prompt), asked.params, seed, prediction_ids=prediction)
        key = self.samples.add(job, sample_index)
        self._keys[index, sample_index] = key
        self.answers[index, sample_index] = Answer(self.recorder.follow(key))
        return key

    def step(self) -> None:
        """One step, and what it brought."""
        if not self.samples.step():
            assert self.engine.has_work, "a step without work"
        for identity, key in list(self._keys.items()):
            if not self.samples.has_news(key):
                continue
            chunk, answer = self.samples.take_chunk(key), self.answers[identity]
            answer.text += chunk.text
            answer.token_ids += chunk.token_ids
            if chunk.completion is not None:
                answer.completion = chunk.completion
                del self._keys[identity]

    def abort(self, index: int) -> int:
        """Take a request back; returns how many of its samples had not ended."""
        keys = [identity for identity in self._keys if identity[0] == index]
        for identity in keys:
            self.samples.drop(self._keys.pop(identity))
        return len(keys)

    @property
    def is_open(self) -> bool:
        return bool(self._keys)


def _alone(case: Case) -> dict[SampleId, Answer]:
    """Every sample in an engine that has nothing else to do, never did, and drafts nothing."""
    most = max(len(one.prompt) + one.params.max_tokens for one in case.requests)
    num_pages = most // PAGE_SIZE + 2
    with opened(case.model.build(), case.model, num_pages, reuse=False) as target:
        run = _Run(Engine(target, NoDrafter()))
        for index, asked in enumerate(case.requests):
            for sample_index in range(asked.params.n):
                run.add(index, asked, sample_index)
                while run.is_open:
                    run.step()
    return run.answers


def _together(
    case: Case, target: AnyTarget, alone: dict[SampleId, Answer], report: Report
) -> list[dict[SampleId, Answer]]:
    """All requests in one engine, twice: the second time their pages may be there already."""
    drafter = make_drafter(case, target)
    engine = Engine(
        target,
        drafter,
        free_drafters=free_drafters() if case.engine.looks_up else (),
        max_running=case.engine.max_running,
        prefill_chunk=case.engine.prefill_chunk,
    )
    run, tally, rounds = _Run(engine), report.tally, []
    for _ in range(_NUM_ROUNDS):
        run.answers = {}
        tally.num_aborted += _run_round(case, run, alone)
        rounds.append(run.answers)
        check_nothing_left(run.samples)
    tally.widths |= run.recorder.widths
    tally.num_drafted += run.recorder.num_drafted
    tally.num_rejected += run.recorder.num_rejected
    tally.num_branched += run.recorder.num_branched
    tally.num_preempted += num_preempted(engine)
    tally.num_reused += num_reused(target)
    return rounds


def _run_round(case: Case, run: _Run, alone: dict[SampleId, Answer]) -> int:
    """The requests come and go as the case says; returns how many samples were taken back."""
    engine, depths = run.engine, cycle(case.engine.depths)
    late = sorted(range(len(case.requests)), key=lambda index: case.requests[index].arrival)
    begun: dict[int, int] = {}
    most_steps, num_aborted = sum(map(_most_steps, case.requests)), 0
    for step in range(most_steps):
        if step % _STEPS_PER_DEPTH == 0:
            _use_depth(engine, next(depths), has_trees=bool(step // _STEPS_PER_DEPTH % 2))
        while late and (case.requests[late[0]].arrival <= step or not run.is_open):
            index = late.pop(0)
            begun[index] = step
            for sample_index in range(case.requests[index].params.n):
                known = alone[index, sample_index].token_ids
                prediction = ()
                if case.engine.looks_up and index % 3:
                    prediction = changed(known, random.Random(f"{case.seed} {index}"))
                key = run.add(index, case.requests[index], sample_index, prediction)
                if isinstance(engine.drafter, ErringOracle):
                    engine.drafter.known[key] = known
        for index, first in begun.items():
            if case.requests[index].aborted_after == step - first:
                num_aborted += run.abort(index)
        if run.is_open:
            run.step()
            check_pages(engine.target)
            check_read(engine)
        elif not late:
            return num_aborted
    raise AssertionError(f"not at its end after {most_steps} steps")


def _use_depth(engine: Engine, depth: int, *, has_trees: bool) -> None:
    """Chains, or trees of as many nodes. An oracle makes small trees of its own either way."""
    engine.use_fixed_drafting(depth if has_trees else min(depth, engine.drafter.max_nodes))


def _most_steps(asked: Asked) -> int:
    """A bound with room for preemption."""
    num_tokens = len(asked.prompt) + asked.params.max_tokens
    return asked.arrival + 100 + 10 * num_tokens * asked.params.n


def _hold_against_stock(case: Case, alone: dict[SampleId, Answer], report: Report) -> None:
    """Plain decoding of the longest sample is what transformers computes, within rounding.

    What is wrong in the same way alone and in company shows here, and nowhere else.
    """
    shape = case.model
    # Rounding may send a token to another expert.
    if shape.dtype not in _TOLERANCE or shape.bad_embedding is not None:
        return
    if shape.is_moe and shape.dtype != "float64":
        return
    answer = max(alone.values(), key=lambda answer: len(answer.trace.sequence.token_ids))
    logits = dict(answer.trace.logits)
    if not logits:
        return
    stock = stock_logits(shape.build(), answer.trace.sequence.token_ids)
    places = sorted(logits)
    ours = torch.stack([logits[place] for place in places])
    theirs = stock[torch.tensor(places) - 1]
    apart = ((ours - theirs).abs().amax(dim=1) / theirs.abs().max()).tolist()
    report.tally.num_against_stock += len(places)
    if max(apart) > _TOLERANCE[shape.dtype]:
        first = next(i for i, much in enumerate(apart) if much > _TOLERANCE[shape.dtype])
        report.wrong.append(
            f"plain decoding is not what transformers computes: logits at position "
            f"{places[first]} are off by {apart[first]:.3g}, at most by {max(apart):.3g}, relative"
        )
