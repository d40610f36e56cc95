"""A sequence's tokens are the same alone and in a batch, its prompt in one chunk or many."""

import itertools
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.verify import TokenLogprobs
from tests.fakes import NoisyOracleDrafter
from tests.parity.checks import Generated, generate_plain
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import KINDS, LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target

EOS = frozenset({50})
NUM_REQUESTS = 9


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    sample_index: int
    cancel_after: int | None


@lru_cache
def oracle(kind: str) -> SequentialTarget:
    return SequentialTarget(tiny_target(kind), layer_ids=LAYER_IDS)


PLACES = [
    *itertools.product(["sequential"], [1, 3, 7, 512]),
    *itertools.product(["paged", "tight"], [3, 512]),
]
"""Where the batch runs, and the chunks of its prompts. A tight memory hardly holds two of them."""


@lru_cache
def exact_target(kind: str, place: str) -> SequentialTarget | PagedTarget:
    way: Way = "sequential" if place == "sequential" else "paged"
    return make_target(way, tiny_target(kind), num_pages=4 if place == "tight" else 65)


@lru_cache
def requests(kind: str) -> tuple[Request, ...]:
    """Greedy and sampled, short and long; every fourth is cancelled after a few tokens."""
    draw = random.Random(KINDS.index(kind))
    found = []
    for index in range(NUM_REQUESTS):
        options: dict[str, Any] = [
            {},
            {"temperature": 1.0, "top_p": 0.9},
            {"temperature": 0.8, "repetition_penalty": 1.2, "min_tokens": 4},
            {"frequency_penalty": 0.5, "num_draft_tokens": 2},
            {"temperature": 1.0, "num_draft_tokens": 0},
        ][index % 5]
        # Half of them outgrow a page while they are decoded.
        num_prompt = draw.choice([1, 6, 33, 70]) if index % 2 else PAGE_SIZE - 3
        found.append(
            Request(
                tuple(draw.randrange(VOCAB_SIZE) for _ in range(num_prompt)),
                SamplingParams(
                    max_tokens=draw.randint(5, 20), seed=draw.getrandbits(64), logprobs=1, **options
                ),
                sample_index=index % 3,
                cancel_after=draw.randint(0, 4) if index % 4 == 3 else None,
            )
        )
    return tuple(found)


@lru_cache
def alone(kind: str, index: int) -> Generated:
    request = requests(kind)[index]
    return generate_plain(
        oracle(kind),
        request.prompt,
        request.params,
        eos_ids=EOS,
        sample_index=request.sample_index,
    )


@lru_cache
def make_drafter(name: str, kind: str, place: str) -> Drafter:
    """One for all batches at a place: its pages are reused from batch to batch."""
    if name == "none":
        return NoDrafter()
    if name == "noisy":
        return NoisyOracleDrafter(6, VOCAB_SIZE, seed=1)
    return make_dflash(exact_target(kind, place), tiny_drafter(block_size=7))


class Batched:
    """Runs all requests in one engine: some come late, some are cancelled."""

    def __init__(self, kind: str, place: str, drafter: Drafter, **options: int) -> None:
        self.kind, self.drafter = kind, drafter
        self.truth = [alone(kind, index) for index in range(NUM_REQUESTS)]
        self.engine = Engine(exact_target(kind, place), drafter, **options)
        self.index_of: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs]] = {}
        self.cancelled: set[int] = set()

    def add(self, index: int) -> None:
        request = requests(self.kind)[index]
        key = self.engine.add(
            request.prompt, request.params, eos_ids=EOS, sample_index=request.sample_index
        )
        self.index_of[key] = index
        self.tokens[index], self.logprobs[index] = [], []
        if isinstance(self.drafter, NoisyOracleDrafter):
            self.drafter.known[key] = self.truth[index].token_ids

    def run(self) -> None:
        late = list(range(NUM_REQUESTS))
        for index in (late.pop(0), late.pop(0)):
            self.add(index)
        while self.engine.has_work or late:
            if late:
                self.add(late.pop(0))
            for output in self.engine.step():
                index = self.index_of[output.key]
                self.tokens[index] += output.token_ids
                self.logprobs[index] += output.logprobs
            self.cancel()

    def cancel(self) -> None:
        for key, index in self.index_of.items():
            limit = requests(self.kind)[index].cancel_after
            if limit is None or index in self.cancelled or len(self.tokens[index]) < limit:
                continue
            self.cancelled.add(index)
            assert self.engine.take(key).sequence.output_ids == self.tokens[index]


@pytest.mark.one_in(72)
@pytest.mark.parametrize("drafter", ["none", "noisy", "dflash"])
@pytest.mark.parametrize("max_running", [1, 3, 16])
@pytest.mark.parametrize(("place", "prefill_chunk"), PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_changes_nothing(
    kind: str, place: str, max_running: int, prefill_chunk: int, drafter: str
) -> None:
    target = exact_target(kind, place)
    batched = Batched(
        kind,
        place,
        make_drafter(drafter, kind, place),
        max_running=max_running,
        prefill_chunk=prefill_chunk,
    )
    batched.run()
    assert len(batched.cancelled) == 2
    assert bool(batched.engine.scheduler.num_preempted) == (place == "tight" and max_running > 1)
    for index in range(NUM_REQUESTS):
        expected, found = batched.truth[index], batched.tokens[index]
        if index not in batched.cancelled:
            assert found == expected.token_ids
        assert found == expected.token_ids[: len(found)]
        assert batched.logprobs[index] == expected.logprobs[: len(found)]
    if isinstance(target, SequentialTarget):
        assert not target._caches
    else:
        target.memory.check_integrity()
        assert target.memory.num_available == target.memory.num_pages - 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prefill_chunk", [1, 3, 7, 512])
def test_a_drafter_sees_the_same_context_however_the_prompt_was_cut(
    prefill_chunk: int, way: Way
) -> None:
    """Chunks that drop features would lower the acceptance and leave the output right."""
    prompt = requests("llama")[0].prompt + tuple(range(40))
    drafts = []
    for chunk in (prefill_chunk, len(prompt)):
        target = make_target(way, tiny_target(dtype=torch.float64))
        drafter = make_dflash(target, tiny_drafter(torch.float64))
        engine = Engine(target, drafter, prefill_chunk=chunk)
        key = engine.add(prompt, SamplingParams(max_tokens=8))
        while engine.progress[key].sequence.is_prefilling:
            engine.step()
        drafts.append(drafter.propose(engine.candidates.apply(engine.scheduler.schedule())))
        engine.take(key)
    assert len(drafts[0][0]) == 5
    assert drafts[0] == drafts[1]
