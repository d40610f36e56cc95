"""All sequences in one forward over pages give what one sequence after another gives.

Tokens, finish reasons and log-probabilities, on six architectures.
"""

import pytest
import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.speculate.drafters.none import NoDrafter
from tests.batched import Request, run_alone, run_batched
from tests.parity.paged_checks import AMPLE, FEW, check_batched
from tests.tiny import ALL_KINDS, tiny_target


@pytest.mark.one_in(12)
@pytest.mark.parametrize("drafter", ["none", "noisy", "dflash"])
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_batch_in_pages(kind: str, reuse: bool, drafter: str) -> None:
    pages = Pages(AMPLE, reuse=reuse)
    batched = check_batched(kind, torch.float64, drafter, pages, chunk=37)
    assert bool(pages.num_reused_tokens) == reuse
    assert batched.engine.scheduler.num_preempted == 0
    assert any(answer.acceptance.drafted for answer in batched.answers) == (drafter != "none")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("drafter", ["none", "noisy", "dflash"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_batch_in_few_pages(kind: str, drafter: str) -> None:
    pages = Pages(FEW)
    batched = check_batched(kind, torch.float64, drafter, pages, chunk=512)
    assert batched.engine.scheduler.num_preempted > 0
    assert pages.num_reused_tokens


@pytest.mark.one_in(12)
@pytest.mark.parametrize("num_pages", [AMPLE, FEW])
@pytest.mark.parametrize("drafter", ["noisy", "dflash"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_batch_in_single_precision(kind: str, drafter: str, num_pages: int) -> None:
    """Where other kernels for few rows, or for many keys, would show in the log-probabilities."""
    check_batched(kind, torch.float32, drafter, Pages(num_pages), chunk=50)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_batch_in_single_precision_without_kernels(kind: str) -> None:
    check_batched(kind, torch.float32, "dflash", Pages(FEW), chunk=50)


BREAKING = 13


def breakable_target() -> PreTrainedModel:
    """A target for which one token gives what is no number."""
    model = tiny_target(dtype=torch.float64)
    with torch.no_grad():
        model.get_input_embeddings().weight[BREAKING] = torch.nan
    return model


def check_broken(requests: list[Request], broken: int, num_pages: int) -> None:
    with SequentialTarget(breakable_target()).released_after() as target:
        expected = run_alone(target, requests)
    failed = [answer.finish_reason == "error" for answer in expected]
    assert failed == [index == broken for index in range(len(requests))]
    with PagedTarget(breakable_target(), Pages(num_pages)).released_after() as target:
        found = run_batched(target, NoDrafter(), requests).answers
    assert found == expected


@pytest.mark.one_in(4)
@pytest.mark.parametrize("num_pages", [3, 40])
@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize("arrivals", [0, 6], ids=["at once", "in turn"])
def test_a_broken_request_harms_nobody_else(arrivals: int, place: int, num_pages: int) -> None:
    """Neither those beside it, nor those that get its pages."""
    prompts = [(4, 5, 6), tuple(range(20, 43)), (7,), tuple(range(40, 40 + PAGE_SIZE // 2))]
    prompts.insert(place, (1, 2, BREAKING, 3, 5))
    params = SamplingParams(max_tokens=5, logprobs=0, logit_bias={BREAKING: -100.0})
    requests = [Request(prompt, params, arrivals * i) for i, prompt in enumerate(prompts)]
    check_broken(requests, place, num_pages)


def test_rows_that_only_fill_up_harm_nobody() -> None:
    """They repeat a broken row, while a sequence of three pages is filled up to four."""
    params = SamplingParams(max_tokens=12, logprobs=0, logit_bias={BREAKING: -100.0})
    others = [token_id for token_id in range(97) if token_id != BREAKING] * 3
    prompts = [tuple(others[: 3 * PAGE_SIZE - 20]), tuple(others[5 : 4 * PAGE_SIZE - 20])]
    requests = [Request(prompt, params) for prompt in prompts]
    requests.append(Request((1, 2, 3, 5, BREAKING), params, arrival=4))
    check_broken(requests, 2, 40)
