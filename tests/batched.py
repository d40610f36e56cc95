"""Many requests in one engine, for tests that hold a batch against lone runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.allocation.policy import Policy
from blockdraft.cache.pages import Pages
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.core.request import FinishReason, SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.target.interface import Target, TargetOutput
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.verify import TokenLogprobs, rows_of


@dataclass(frozen=True)
class Request:
    """What is asked, and after how many steps of the engine."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0


@dataclass
class Answer:
    """Everything of one request that its company must not change, and its acceptance counts."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    acceptance: AcceptanceStats = field(default_factory=AcceptanceStats, compare=False)


@dataclass(frozen=True)
class Batched:
    """Answers in the order of the requests, the key of each, and the engine that gave them."""

    answers: list[Answer]
    keys: list[int]
    engine: Engine


def run_batched(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    known: Sequence[Sequence[int]] | None = None,
    after_step: Callable[[Engine], None] | None = None,
    policy: Policy | None = None,
    **options: Any,
) -> Batched:
    """Run all requests in one engine; `known` are outputs for a drafter that knows them."""
    engine = Engine(target, drafter, **options)
    if policy is not None:
        engine.allocator.policy = policy
    answers, keys, num_steps = [Answer() for _ in requests], [-1] * len(requests), 0
    late = sorted(range(len(requests)), key=lambda index: requests[index].arrival)
    try:
        while late or engine.has_work:
            while late and (requests[late[0]].arrival <= num_steps or not engine.has_work):
                index = late.pop(0)
                keys[index] = engine.add(requests[index].prompt, requests[index].params)
                if known is not None and hasattr(drafter, "known"):
                    drafter.known[keys[index]] = list(known[index])
            for output in engine.step():
                answer = answers[keys.index(output.key)]
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs
                answer.finish_reason = output.finish_reason
            num_steps += 1
            if after_step is not None:
                after_step(engine)
    finally:
        for index, key in enumerate(keys):
            if key >= 0:
                answers[index].acceptance = engine.take(key).acceptance
    return Batched(answers, keys, engine)


def run_alone(target: Target, requests: Sequence[Request]) -> list[Answer]:
    """Each request plainly, alone in an engine of its own."""
    return [run_batched(target, NoDrafter(), [request]).answers[0] for request in requests]


def check_aborted(
    target: Target,
    drafter: Any,
    requests: Sequence[Request],
    known: Sequence[list[int]],
    aborted: Sequence[int],
    **options: Any,
) -> None:
    """Some are taken away after three steps, and all have as much of what is known as they got."""
    engine = Engine(target, drafter, **options)
    keys = [engine.add(request.prompt, request.params) for request in requests]
    drafter.known = dict(zip(keys, known, strict=True))
    for _ in range(3):
        engine.step()
    for place in aborted:
        found = engine.take(keys[place]).sequence.output_ids
        assert found == known[place][: len(found)]
    while engine.has_work:
        engine.step()
    for place in set(range(len(keys))) - set(aborted):
        assert engine.take(keys[place]).sequence.output_ids == known[place]


def paged_pair(
    model: PreTrainedModel, draft_model: DraftModel, pages: Pages
) -> tuple[PagedTarget, DFlashDrafter]:
    """A target and its drafter with one page table for both, as they are deployed."""
    target = PagedTarget(model, pages, layer_ids=draft_model.config.target_layer_ids)
    contexts = PagedContexts(draft_model.config, pages, draft_model.fc.weight)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return target, DFlashDrafter(draft_model, embedding, head, contexts)


class LogitsRecorder:
    """A target that keeps the logits [V] by which each position of each sequence was chosen."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.vocab_size, self.max_context = target.vocab_size, target.max_context
        self.memory, self.takes_trees = target.memory, target.takes_trees
        self.logits: dict[tuple[int, int], Tensor] = {}
        self._last: dict[int, tuple[int, Tensor]] = {}
        """Of each sequence the last forward's logits, and the position behind its anchor."""

    @property
    def by_position(self) -> dict[int, Tensor]:
        """Of the only sequence."""
        assert len({key for key, _ in self.logits}) == 1
        return {position: logits for (_, position), logits in self.logits.items()}

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        output = self.target.forward(plan)
        for planned, own in zip(plan, rows_of(plan, output.logits), strict=True):
            row = planned.row
            self._last[row.sequence.key] = row.sequence.num_cached + len(row.new_ids), own
        return output

    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        key = planned.row.sequence.key
        first, logits = self._last.pop(key)
        if len(logits):  # not of a prompt that goes on
            path = [0, *(1 + node for node in nodes)]
            self.logits |= {(key, first + i): logits[place] for i, place in enumerate(path)}
        self.target.keep(planned, nodes)

    def truncate(self, key: int, length: int) -> None:
        self.target.truncate(key, length)

    def close(self, key: int) -> None:
        self.target.close(key)
