"""Every planted fault is caught by a losslessness check, and the same check passes without it."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache, partial

import pytest
import torch

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.plan import ForwardPlan
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.engine.engine import Engine
from blockdraft.engine.scheduler import Scheduler
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.proof.faults import (
    keep_one_too_many,
    redraw,
    redraw_rejected,
    verifying_by,
)
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.none import NoDrafter
from blockdraft.speculate.verify import verify
from tests.batched import LogitsRecorder
from tests.fakes import NoisyOracleDrafter, TableTarget
from tests.parity import faults
from tests.parity.checks import (
    check_distribution,
    check_draft_context,
    check_drafted_equals_plain,
    check_samples_differ,
    check_together_equals_alone,
    generate,
    generate_plain,
)
from tests.parity.proposals import OwnLogits
from tests.parity.targets import WAYS, Way, make_dflash, make_target
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
        (partial(verifying_by, keep_one_too_many), GREEDY),
        (partial(verifying_by, keep_one_too_many), SAMPLED),
        (partial(verifying_by, redraw_rejected), SAMPLED),
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


def new_target(way: Way, num_pages: int = 9) -> SequentialTarget | PagedTarget:
    return make_target(way, tiny_target(dtype=torch.float64), num_pages=num_pages)


def new_drafter(
    target: SequentialTarget | PagedTarget, drafter_type: type[DFlashDrafter] = DFlashDrafter
) -> DFlashDrafter:
    return make_dflash(target, tiny_drafter(torch.float64, block_size=6), drafter_type)


def check_context(drafter_type: type[DFlashDrafter], way: Way) -> None:
    """The draft context is right after every step, written at once or after a while."""
    target = new_target(way)
    drafter = new_drafter(target, drafter_type)
    for most in (None, 2):
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=2, num_draft_tokens=most)
        for prompt, chunk in ((PROMPT, 3), ([*range(90)], 40), (range(80), 512)):
            options = {"prefill_chunk": chunk}
            generate(
                target,
                drafter,
                prompt,
                params,
                engine_options=options,
                after_step=check_draft_context,
            )


@pytest.mark.parametrize("way", WAYS)
def test_the_context_check_passes_without_a_fault(way: Way) -> None:
    check_context(DFlashDrafter, way)


@pytest.mark.parametrize("way", WAYS)
def test_the_context_check_finds_a_context_with_the_anchor(way: Way) -> None:
    with pytest.raises(AssertionError, match="ends elsewhere"):
        check_context(faults.AnchorInContext, way)


@pytest.mark.parametrize("way", WAYS)
def test_the_context_check_finds_features_of_the_wrong_position(way: Way) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_context(faults.ShiftedContext, way)


@pytest.mark.parametrize("way", WAYS)
def test_the_drafter_itself_refuses_a_context_with_the_anchor(way: Way) -> None:
    drafter = new_drafter(target := new_target(way), faults.AnchorInContext)
    with pytest.raises(AssertionError):
        generate(target, drafter, PROMPT, GREEDY)


def check_pages() -> None:
    """Sequences in pages, drafted and plain, are what the sequential target makes of them."""
    target, oracle = new_target("paged", 12), float64_target()
    params = SamplingParams(max_tokens=8)
    draw = random.Random(4)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(num)] for num in (120, 5, 70)]
    for drafter in (NoDrafter(), new_drafter(target)):
        outputs = check_together_equals_alone(target, drafter, oracle, prompts, params)
        # The next turn of a conversation whose tokens fill two pages, one of them not written out.
        conversation = prompts[0] + outputs[0] + [7, 8, 9]
        assert len(conversation) == 2 * PAGE_SIZE + 3
        check_together_equals_alone(target, drafter, oracle, [conversation], params)
        # The same tokens at another place.
        check_together_equals_alone(target, drafter, oracle, [conversation[PAGE_SIZE:]], params)
    assert target.memory.num_reused_tokens == 2 * PAGE_SIZE
    target.memory.check_integrity()


def test_the_pages_check_passes_without_a_fault() -> None:
    check_pages()


@pytest.mark.parametrize(
    "fault",
    [
        faults.page_turned_too_early,
        faults.fill_rows_in_a_real_page,
        faults.digest_without_parent,
        faults.anchor_published,
    ],
)
def test_the_pages_check_finds(fault: Callable[[], AbstractContextManager[object]]) -> None:
    with fault(), pytest.raises(AssertionError, match="together differs from alone"):
        check_pages()


def check_shared_context(drafter_type: type[DFlashDrafter] = DFlashDrafter) -> None:
    """The draft context is right in pages taken over, and after a preemption."""
    target, oracle = new_target("paged", 4), float64_target()
    drafter = new_drafter(target, drafter_type)
    params = SamplingParams(max_tokens=12)
    prompts = [list(range(num)) for num in (59, 70, 58)]
    plain = replace(params, num_draft_tokens=0)
    check_together_equals_alone(target, drafter, oracle, prompts[1:2], plain)
    scheduler: Scheduler | None = None

    def check(engine: Engine, key: int) -> None:
        nonlocal scheduler
        scheduler = engine.scheduler
        check_draft_context(engine, key)

    for _ in range(2):
        check_together_equals_alone(target, drafter, oracle, prompts, params, after_step=check)
        assert scheduler is not None
        assert scheduler.num_preempted
    assert target.memory.num_reused_tokens


def test_the_shared_context_check_passes_without_a_fault() -> None:
    check_shared_context()


def test_the_shared_context_check_finds_a_context_that_was_never_written() -> None:
    with (
        faults.context_never_written(),
        pytest.raises(AssertionError, match="not close"),
    ):
        check_shared_context()


def test_the_shared_context_check_finds_a_context_that_outlives_its_pages() -> None:
    with pytest.raises(AssertionError):
        check_shared_context(faults.ContextOutlivesPages)


def check_mixed_contexts() -> None:
    """The draft context is right where requests that draft and others share their beginnings."""
    target = new_target("paged", 16)
    drafter, prompt = new_drafter(target), [*range(PAGE_SIZE + 6)]
    engine, drafting = Engine(target, drafter), []
    for index, most in enumerate((0, None, 0, None, None)):
        params = SamplingParams(max_tokens=8, num_draft_tokens=most)
        key = engine.add([*prompt, index], params)
        if most is None:
            drafting.append(key)
        for _ in range(4):
            engine.step()
            for one in drafting:
                check_draft_context(engine, one)
    while engine.has_work:
        engine.step()
        for one in drafting:
            check_draft_context(engine, one)
    # The third and later ones took over a page of their own kind.
    assert target.memory.num_reused_tokens >= 3 * PAGE_SIZE


def test_the_mixed_contexts_check_passes_without_a_fault() -> None:
    check_mixed_contexts()


@pytest.mark.parametrize(
    "fault",
    [faults.contexts_of_one_kind, faults.everybody_has_a_context, faults.context_never_written],
)
def test_the_mixed_contexts_check_finds(
    fault: Callable[[], AbstractContextManager[object]],
) -> None:
    with fault(), pytest.raises(AssertionError, match="not close"):
        check_mixed_contexts()


OWN_LOGITS_PARAMS = (
    GREEDY,
    SAMPLED,
    SamplingParams(max_tokens=24, temperature=0.7, seed=3, top_p=0.9, repetition_penalty=1.2),
    SamplingParams(max_tokens=24, temperature=1.5, seed=3, top_k=20, min_tokens=9),
)


def check_own_logits(params: SamplingParams) -> None:
    """A drafter with the target's own logits is accepted to the last token, at any temperature."""
    target = new_target("sequential")
    recorder = LogitsRecorder(target)
    plain = generate_plain(recorder, PROMPT, params)
    drafter = new_drafter(target, OwnLogits)
    drafter.known = {position: own for (_, position), own in recorder.logits.items()}
    drafted = generate(target, drafter, PROMPT, params)
    assert drafted.token_ids == plain.token_ids
    acceptance = drafted.acceptance
    assert sum(acceptance.drafted.values()) > len(plain.token_ids) // 2
    assert acceptance.accepted == acceptance.drafted, "a guess from the target's logits is rejected"


@pytest.mark.parametrize("params", OWN_LOGITS_PARAMS, ids=str)
def test_the_targets_own_logits_are_accepted(params: SamplingParams) -> None:
    check_own_logits(params)


def test_the_check_of_own_logits_finds_one_noise_for_all_slots() -> None:
    with faults.one_noise_for_all_slots(), pytest.raises(AssertionError, match="is rejected"):
        check_own_logits(SAMPLED)


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
        (verdict,) = verify(ForwardPlan.of_chains([Row(sequence, [1], 1)], [[0]]), logits)
        if broken and not verdict.num_accepted:
            yield redraw(logits, sequence, [0], 0)
        else:
            yield verdict.token_ids[0]


@pytest.mark.parametrize("broken", [False, True])
def test_the_distribution_check_finds_a_redraw_after_a_rejection(broken: bool) -> None:
    probabilities = torch.tensor([1.5, 1.0, 0.5, 0.0], dtype=torch.float64).softmax(0)
    counts = torch.bincount(torch.tensor(list(first_tokens(4000, broken=broken))), minlength=4)
    with pytest.raises(AssertionError, match="another") if broken else nullcontext():
        check_distribution(counts, probabilities)
