"""The check that a batch in pages gives what lone runs give on the sequential path."""

import random
from functools import lru_cache
from typing import Any

import torch

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.kernels.backends import backend_for
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Answer, Batched, Request, paged_pair, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

AMPLE, FEW = 64, 5
"""Pages; few are enough for the longest request, and for no second one of its size."""


@lru_cache
def requests() -> tuple[Request, ...]:
    """Greedy and sampled, of all lengths; most have a beginning that another one has too."""
    draw = random.Random(0)

    def some(num: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCAB_SIZE) for _ in range(num))

    first, second = some(PAGE_SIZE), some(PAGE_SIZE)
    prompts = [
        first + second + some(40),
        some(57),
        first + second,
        first + second + some(1),
        # The second page of the first prompt behind another first page.
        (base := some(PAGE_SIZE)) + some(30),
        base + second + some(9),
        first + some(60),
        some(1),
        first + second + some(58),
    ]
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"num_draft_tokens": 3},
        {"temperature": 0.8, "repetition_penalty": 1.2},
        {"num_draft_tokens": 0},
    ]
    return tuple(
        Request(
            prompt,
            SamplingParams(
                max_tokens=draw.randint(10, 24),
                seed=index,
                logprobs=1,
                **options[index % len(options)],
            ),
            # The later half comes when the beginnings of the first can be reused.
            arrival=2 * index + (6 if index >= 5 else 0),
        )
        for index, prompt in enumerate(prompts)
    )


def alone(kind: str, dtype: torch.dtype) -> list[Answer]:
    """Plain decoding on the path that every faster one is held against."""
    return _alone(kind, dtype, has_kernels=backend_for(torch.float32, "cpu").reads_pages)


@lru_cache
def _alone(kind: str, dtype: torch.dtype, *, has_kernels: bool) -> list[Answer]:
    with SequentialTarget(tiny_target(kind, dtype)).released_after() as target:
        return run_alone(target, requests())


def paged(kind: str, dtype: torch.dtype, name: str, pages: Pages) -> tuple[PagedTarget, Drafter]:
    if name == "dflash":
        return paged_pair(tiny_target(kind, dtype), tiny_drafter(dtype, block_size=6), pages)
    drafters: dict[str, Drafter] = {
        "none": NoDrafter(),
        "noisy": NoisyOracleDrafter(5, VOCAB_SIZE, seed=1),
    }
    return PagedTarget(tiny_target(kind, dtype), pages), drafters[name]


def check_batched(
    kind: str, dtype: torch.dtype, drafter: str, pages: Pages, *, chunk: int
) -> Batched:
    """The batch's answers are those of lone runs, and every page comes back."""

    def check_pages(engine: Engine) -> None:
        pages.check_integrity()

    expected = alone(kind, dtype)
    target, guesser = paged(kind, dtype, drafter, pages)
    with target.released_after():
        batched = run_batched(
            target,
            guesser,
            requests(),
            known=[answer.token_ids for answer in expected],
            after_step=check_pages,
            prefill_chunk=chunk,
        )
    for index, (found, wanted) in enumerate(zip(batched.answers, expected, strict=True)):
        assert found == wanted, f"request {index} differs from its lone run"
    assert pages.num_available == pages.num_pages - 1
    return batched
