"""Every planted fault is caught by a losslessness check, and the same check passes without it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import pytest
import torch

from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.sequential import SequentialTarget
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.verify import verify
from tests.fakes import NoisyOracleDrafter, TableTarget
from tests.parity import faults
from tests.parity.checks import (
    check_distribution,
    check_draft_context,
    check_drafted_equals_plain,
    check_samples_differ,
    generate,
)
from tests.tiny import LAYER_IDS, VOCAB_SIZE, tiny_drafter, tiny_target

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=11)


def check_equality(params: SamplingParams, target: SequentialTarget | TableTarget) -> None:
    drafter = NoisyOracleDrafter(5, target.vocab_size, seed=3)
    result = check_drafted_equals_plain(target, drafter, PROMPT, params)
    assert result.acceptance.num_passes < result.acceptance.num_tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_equality_check_passes_without_a_fault(params: SamplingParams) -> None:
    check_equality(params, TableTarget.random(VOCAB_SIZE))
    with SequentialTarget(tiny_target()).released_after() as target:
        check_equality(params, target)


@pytest.mark.parametrize(
    ("fault", "params"),
    [
        (faults.accept_one_too_many, GREEDY),
        (faults.accept_one_too_many, SAMPLED),
        (faults.redraw_after_rejection, SAMPLED),
        (faults.noise_by_slot, SAMPLED),
    ],
)
def test_the_equality_check_finds(
    fault: Callable[[], AbstractContextManager[None]], params: SamplingParams
) -> None:
    with fault(), pytest.raises(AssertionError, match="drafted differs from plain"):
        check_equality(params, TableTarget.random(VOCAB_SIZE))


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_equality_check_finds_a_cache_cropped_by_one_too_few(params: SamplingParams) -> None:
    with (
        faults.CropOneTooFew(tiny_target()).released_after() as target,
        pytest.raises(AssertionError, match="drafted differs from plain"),
    ):
        check_equality(params, target)


@lru_cache
def float64_target() -> SequentialTarget:
    return SequentialTarget(tiny_target(dtype=torch.float64), layer_ids=LAYER_IDS)


def check_context(drafter_type: type[DFlashDrafter]) -> None:
    """The draft context is right after every step."""
    target = float64_target()
    model = target.model
    drafter = drafter_type(
        tiny_drafter(torch.float64, block_size=6),
        model.get_input_embeddings().weight,
        model.get_output_embeddings().weight,
    )
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=2)
    options = {"prefill_chunk": 3}
    generate(
        target, drafter, PROMPT, params, engine_options=options, after_step=check_draft_context
    )


def test_the_context_check_passes_without_a_fault() -> None:
    check_context(DFlashDrafter)


def test_the_context_check_finds_a_context_with_the_anchor() -> None:
    with pytest.raises(AssertionError, match="ends elsewhere"):
        check_context(faults.AnchorInContext)


def test_the_context_check_finds_features_of_the_wrong_position() -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_context(faults.ShiftedContext)


def test_the_drafter_itself_refuses_a_context_with_the_anchor() -> None:
    target = float64_target()
    drafter = faults.AnchorInContext(
        tiny_drafter(torch.float64),
        target.model.get_input_embeddings().weight,
        target.model.get_output_embeddings().weight,
    )
    with pytest.raises(AssertionError):
        generate(target, drafter, PROMPT, GREEDY)


@pytest.mark.parametrize("broken", [False, True])
def test_the_samples_check_finds_one_noise_for_all_samples(broken: bool) -> None:
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=4, n=8)
    target = TableTarget.random(VOCAB_SIZE)
    if not broken:
        check_samples_differ(target, PROMPT, params)
        return
    with faults.one_noise_for_all_samples(), pytest.raises(AssertionError, match="equal"):
        check_samples_differ(target, PROMPT, params)


def first_tokens(num: int, *, broken: bool) -> Iterator[int]:
    """The first choice at one position, drafted as the most likely token, of many samples."""
    logits = torch.tensor([[1.5, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    params = SamplingParams(temperature=1.0, seed=6)
    for index in range(num):
        sequence = Sequence(0, params, 6, index, frozenset(), [1], 1)
        (verdict,) = verify([[0]], [logits], [Row(sequence, [1], 1)])
        if broken and not verdict.num_accepted:
            yield faults.redraw(logits, sequence, [0], 0)
        else:
            yield verdict.token_ids[0]


@pytest.mark.parametrize("broken", [False, True])
def test_the_distribution_check_finds_a_redraw_after_a_rejection(broken: bool) -> None:
    probabilities = torch.tensor([1.5, 1.0, 0.5, 0.0], dtype=torch.float64).softmax(0)
    counts = torch.bincount(torch.tensor(list(first_tokens(4000, broken=broken))), minlength=4)
    with pytest.raises(AssertionError, match="another") if broken else nullcontext():
        check_distribution(counts, probabilities)
