"""The default pair as deployed here: a request alone and the same request in a batch.

Tokens, log-probabilities and the bits of the logits behind every kept token are the same, with the
prompt in chunks or at once, its beginning computed or taken over, preempted or not, drafted or not.
"""

import random
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.allocation.best_rate import BestRate
from blockdraft.allocation.cost_measurement import measure_costs
from blockdraft.allocation.policy import Policy, VerifyAll
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Batched, LogitsRecorder, Request, paged_pair, run_batched
from tests.exact.pair import DTYPE, default_drafter, load_target, prompt_ids

pytestmark = pytest.mark.model

NUM_REQUESTS = 16
AMPLE, FEW = 400, 26
"""Pages; few do not hold the batch. Either holds the longest request."""
LONG = 1030
"""Tokens of one prompt: more than a tile of keys."""
MOST = 300
"""Tokens that are left of the others, so that they take no more time than needed."""


@lru_cache
def requests(num_tokens: int) -> tuple[Request, ...]:
    """Short, long and very long prompts; every third begins with the same preface."""
    draw = random.Random(5)
    chosen = [list(prompt_ids()[index][:MOST]) for index in draw.sample(range(200), NUM_REQUESTS)]
    preface = [token_id for prompt in sorted(chosen, key=len)[-3:] for token_id in prompt]
    preface = preface[: 2 * PAGE_SIZE + 9]
    chosen[1] = (preface * (1 + LONG // len(preface)))[:LONG]
    found = []
    for index, prompt in enumerate(chosen):
        sampling = [{}, {"temperature": 0.7, "top_p": 0.9}, {"num_draft_tokens": 3}][index % 3]
        params = SamplingParams(
            max_tokens=num_tokens + index, ignore_eos=True, seed=index, logprobs=1, **sampling
        )
        prompt = preface + prompt if index % 3 == 0 else prompt
        if len(prompt) > PAGE_SIZE:
            # A few tokens before the end of a page: all will ask for one more at about one time.
            prompt = prompt[: (len(prompt) + 3) // PAGE_SIZE * PAGE_SIZE - 3]
        # In pairs, so that some find the preface written, and some compute it at the same time.
        found.append(Request(tuple(prompt), params, arrival=index // 4))
    return tuple(found)


Bits = dict[int, torch.Tensor]
"""By position, the logits [V] behind the token there."""


@lru_cache
def model() -> PreTrainedModel:
    return load_target(DTYPE)


@lru_cache
def alone(num_tokens: int, index: int) -> tuple[Batched, Bits]:
    """Plain, at once, nobody beside it: on the path that runs one sequence after another."""
    request = requests(num_tokens)[index]
    with SequentialTarget(model()).released_after() as target:
        recorder = LogitsRecorder(target)
        batched = run_batched(recorder, NoDrafter(), [replace(request, arrival=0)])
    return batched, {position: logits for (_, position), logits in recorder.logits.items()}


def make_policy(name: str, target: PagedTarget, drafter: Drafter) -> Policy:
    if name == "fixed":
        return VerifyAll()
    return BestRate(
        measure_costs(target, drafter),
        15,
        drafter.max_nodes,
        drafter.lag,
        model_kind=drafter.kind,
    )


def check_batched(
    num_tokens: int, checked: list[int], depth: str, pages: Pages, *, chunk: int
) -> Batched:
    """`depth` is "plain", "fixed" or "adaptive"; the requests in `checked` are run alone too."""
    target, drafter = paged_pair(model(), default_drafter(), pages)
    with target.released_after():
        recorder = LogitsRecorder(target)
        guesser = NoDrafter() if depth == "plain" else drafter
        batched = run_batched(
            recorder,
            guesser,
            requests(num_tokens),
            policy=make_policy("fixed" if depth == "plain" else depth, target, drafter),
            prefill_chunk=chunk,
            after_step=lambda engine: pages.check_integrity(),
        )
    for index in checked:
        expected, bits = alone(num_tokens, index)
        assert batched.answers[index] == expected.answers[0], index
        start = len(requests(num_tokens)[index].prompt)
        for position in range(start, start + num_tokens + index):
            found = recorder.logits[batched.keys[index], position]
            assert torch.equal(found, bits[position]), (index, position)
    assert pages.num_available == pages.num_pages - 1
    return batched


@pytest.mark.slow
@pytest.mark.parametrize("depth", ["plain", "fixed", "adaptive"])
def test_batch_does_not_change_a_request(depth: str) -> None:
    """Chunks, prefix hits and preemption at once."""
    pages = Pages(FEW)
    batched = check_batched(12, [0, 1, 3, 6, 8, 10, 15], depth, pages, chunk=200)
    assert batched.engine.scheduler.num_preempted > 0
    assert pages.num_reused_tokens >= 2 * PAGE_SIZE


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("chunk", [50, 512])
@pytest.mark.parametrize("depth", ["plain", "fixed", "adaptive"])
def test_batch_does_not_change_any_request(
    depth: str, chunk: int, reuse: bool, num_pages: int
) -> None:
    pages = Pages(num_pages, reuse=reuse)
    batched = check_batched(48, list(range(NUM_REQUESTS)), depth, pages, chunk=chunk)
    assert (batched.engine.scheduler.num_preempted > 0) == (num_pages == FEW)
    assert bool(pages.num_reused_tokens) == reuse
