"""In a batch in which nobody drafts most outputs leave the drafter no features; answers stay."""

from dataclasses import replace

import pytest

from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.plan import NOTHING
from blockdraft.core.request import SamplingParams
from blockdraft.engine.engine import Engine
from blockdraft.speculate.drafters import lazy_context
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.eagle3 import Eagle3Drafter
from tests.parity.checks import generate_plain
from tests.parity.targets import make_dflash, make_eagle, make_target
from tests.parity.test_eagle3 import make_model
from tests.tiny import tiny_drafter, tiny_target

NUM_SEQUENCES = lazy_context.MANY_SEQUENCES + 1
PARAMS = SamplingParams(max_tokens=3 * PAGE_SIZE, ignore_eos=True)
PROMPTS = [[3, index, 5] for index in range(NUM_SEQUENCES)]
IDLE_STEPS = 4 * lazy_context._ASKED_STEPS


class Batched:
    """A batch of which nobody is asked at first."""

    def __init__(self) -> None:
        self.target = make_target("paged", tiny_target())
        self.drafter = make_dflash(self.target, tiny_drafter())
        self.engine = Engine(self.target, self.drafter, max_running=NUM_SEQUENCES)
        self.engine.use_fixed_drafting(0)
        self.keys = [self.engine.add(prompt, PARAMS) for prompt in PROMPTS]

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.engine.step()

    def num_known(self, key: int) -> int:
        length = self.engine.progress[key].sequence.num_cached
        return len(self.drafter.contexts.positions(key, length))


def test_most_outputs_are_given_up_while_nobody_drafts() -> None:
    batched = Batched()
    batched.run(IDLE_STEPS)
    # It takes some steps until it is sure that nobody drafts; one in eight keeps all.
    lengths = [batched.engine.progress[key].sequence.num_cached for key in batched.keys]
    known = [batched.num_known(key) for key in batched.keys]
    tried = [key % lazy_context._TRIED == 0 for key in batched.keys]
    assert any(tried)
    assert not all(tried)
    for key, length, num_known in zip(batched.keys, lengths, known, strict=True):
        if key % lazy_context._TRIED == 0:
            assert num_known == length
        else:
            assert num_known <= length - PAGE_SIZE // 2
    # Prompts are kept: what they have in common is of use to others.
    late = batched.engine.take(batched.keys[1])
    prompt = [*late.sequence.token_ids[: 2 * PAGE_SIZE], 7]
    key = batched.engine.add([9, *prompt], PARAMS)
    batched.run(1)
    assert batched.num_known(key) == len(prompt) + 1


def test_those_that_were_given_up_draft_again_behind_the_page() -> None:
    batched = Batched()
    batched.run(IDLE_STEPS)
    batched.engine.use_fixed_drafting(5)
    batch = batched.engine.candidates.apply(batched.engine.scheduler.schedule())
    may_draft = [batched.drafter.lag(row) is not None for row in batch]
    assert any(may_draft)
    assert not all(may_draft)
    proposals = batched.drafter.propose(batch)
    assert [proposal != NOTHING for proposal in proposals] == may_draft
    while batched.engine.has_work:
        batched.engine.step()
    for key, prompt in zip(batched.keys, PROMPTS, strict=True):
        record = batched.engine.take(key)
        plain = generate_plain(batched.target, prompt, PARAMS)
        assert record.sequence.output_ids == plain.token_ids
        assert record.acceptance.num_drafted > 0
    assert batched.engine.proposer.failures.num_failures == 0


def test_an_asked_batch_gives_nothing_up() -> None:
    batched = Batched()
    batched.engine.use_fixed_drafting(1)
    batched.run(20)
    assert not batched.drafter.contexts._given_up


@pytest.mark.parametrize("company", ["plain", "prompts"])
def test_who_drafts_gives_nothing_up_in_company_that_cannot(
    company: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside requests that never draft, or whose prompts go in for long."""
    monkeypatch.setattr(lazy_context, "_ASKED_STEPS", 4)
    num_beside = 3 * round(1 / lazy_context._IDLE_SHARE)
    target = make_target("paged", tiny_target(), num_pages=4 * num_beside)
    drafter = make_dflash(target, tiny_drafter())
    engine = Engine(target, drafter, max_running=num_beside + 2, prefill_chunk=1)
    engine.use_fixed_drafting(1)
    # One of two neighbors at least is none that keeps its features in any case.
    asked = [engine.add([9, number], replace(PARAMS, max_tokens=48)) for number in range(2)]
    num_prompt = PAGE_SIZE if company == "prompts" else 2
    params = PARAMS if company == "prompts" else replace(PARAMS, num_draft_tokens=0)
    for number in range(num_beside):
        engine.add([number] * num_prompt, params)
    while not any(engine.progress[key].sequence.finish_reason for key in asked):
        engine.step()
        assert not drafter.contexts._given_up


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_drafts_go_on_without_a_page(kind: str) -> None:
    """Any page of any drafter: proposals are found, and the answer is that of plain decoding."""
    with make_target("paged", tiny_target()).released_after() as target:
        drafter: DFlashDrafter | Eagle3Drafter
        if kind == "dflash":
            drafter = make_dflash(target, tiny_drafter())
        else:
            drafter = make_eagle(target, make_model())
        engine = Engine(target, drafter, max_running=2)
        engine.use_fixed_drafting(3)
        prompts = [[length % 11, *(i % 7 for i in range(length))] for length in (70, 150)]
        keys = [engine.add(prompt, PARAMS) for prompt in prompts]
        engine.step()
        for key in keys:
            drafter.contexts.give_up(key, 0, 1)
        while engine.has_work:
            engine.step()
        for key, prompt in zip(keys, prompts, strict=True):
            record = engine.take(key)
            assert record.sequence.output_ids == generate_plain(target, prompt, PARAMS).token_ids
            assert record.acceptance.num_drafted > 50
        assert engine.proposer.failures.num_failures == 0
