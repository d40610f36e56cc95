"""The engine's bookkeeping under everything at once, with models that are fakes.

The fake target and the fake draft context keep tokens where real ones keep keys and values: in the
slots of pages. A wrong page table, a shared page that was written, or a slot that was given to
somebody else shows in what they read back.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from blockdraft.allocation.policy import VerifyAll
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.plan import ForwardPlan, PlannedRow, Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.engine.engine import Engine
from blockdraft.models.draft.context import LayerKV
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.waiting_features import Waiting, WaitingFeatures
from blockdraft.models.target.interface import RowFeatures, TargetOutput
from blockdraft.speculate.drafters.base import Drafter
from blockdraft.speculate.drafters.dflash import DFlashDrafter
from blockdraft.speculate.drafters.lazy_context import LazyContext
from blockdraft.speculate.drafters.none import NoDrafter

VOCAB_SIZE = 11
MAX_DRAFT_TOKENS = 5
NUM_STEPS = 1500


def next_id(token_ids: Sequence[int]) -> int:
    """What the fake target says behind these tokens: each of them matters."""
    return hash(tuple(token_ids)) % VOCAB_SIZE


def plain_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_id(token_ids))
    return token_ids[len(prompt) :]


class Slots:
    """What was written last to each slot; -1 to none."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.content = [-1] * (pages.num_pages * PAGE_SIZE)

    def write(self, key: int, start: int, values: Sequence[int]) -> None:
        self.write_at(self.pages.slots(key, start, start + len(values)), values)

    def write_at(self, slots: Sequence[int], values: Sequence[int]) -> None:
        for slot, value in zip(slots, values, strict=True):
            self.content[slot] = value

    def read(self, key: int, num_tokens: int) -> list[int]:
        found: list[int] = []
        for page_id in self.pages.page_ids(key):
            found += self.content[page_id * PAGE_SIZE : (page_id + 1) * PAGE_SIZE]
        assert len(found) >= num_tokens, "no room was reserved"
        return found[:num_tokens]


class SlotTarget:
    """Answers from what it reads in its slots. A token's feature is the token."""

    vocab_size = VOCAB_SIZE
    max_context = 4096
    takes_trees = False

    def __init__(self, pages: Pages) -> None:
        self.memory = pages
        self.slots = Slots(pages)

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        choices: list[int] = []
        features: list[RowFeatures | None] = []
        # All rows write before any of them reads, as in one forward.
        for planned in plan:
            assert planned.tree.is_chain
            sequence = planned.row.sequence
            self.slots.write(sequence.key, sequence.num_cached, planned.token_ids)
        for planned in plan:
            row, num_draft = planned.row, len(planned.tree)
            end = row.sequence.num_cached + len(row.new_ids)
            held = self.slots.read(row.sequence.key, end + num_draft)
            if row.is_complete:
                choices += [next_id(held[: end + i]) for i in range(1 + num_draft)]
            features.append(RowFeatures(torch.tensor([planned.token_ids]).T))
        logits = torch.zeros(len(choices), VOCAB_SIZE)
        logits[torch.arange(len(choices)), torch.tensor(choices, dtype=torch.long)] = 1.0
        return TargetOutput(logits, features)

    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """What is behind the end is written again before it is read."""

    def truncate(self, key: int, length: int) -> None:
        """See above."""

    def close(self, key: int) -> None:
        self.memory.close(key)


class SlotContexts(PagedContexts):
    """Draft contexts of all sequences; keys are tokens, values positions."""

    def __init__(self, pages: Pages, limit: int) -> None:
        self.token_ids, self.places = Slots(pages), Slots(pages)
        self.pages = pages
        self.waiting = WaitingFeatures(limit)
        self._given_up = set()
        pages.on_forget = self._forget

    def write(self, needed: Sequence[Waiting], context_kv: Sequence[LayerKV]) -> None:
        token_ids, positions = (t.flatten().tolist() for t in context_kv[0])
        done = 0
        for waiting in needed:
            end = done + len(waiting)
            first = waiting.holder * PAGE_SIZE + waiting.start % PAGE_SIZE
            for slots, values in ((self.token_ids, token_ids), (self.places, positions)):
                slots.write_at(range(first, first + end - done), values[done:end])
            done = end
            self.waiting.drop(waiting.holder)
        assert done == len(token_ids)


class SlotDrafter(DFlashDrafter):
    """The bookkeeping of the real drafter. Right with a chance, if its context is right."""

    def __init__(self, contexts: SlotContexts, draw: random.Random) -> None:
        LazyContext.__init__(self)
        self.kind = "dflash"
        self.embed_weight = torch.zeros(VOCAB_SIZE, 1)
        self.max_nodes = MAX_DRAFT_TOKENS
        self.feature_layers = (0,)
        self.contexts = contexts
        self.draw = draw
        self.num_given_up = 0

    def _write(self, piece: list[Waiting]) -> None:
        self.contexts.write(piece, [self._inputs(piece)])

    def _gives_up(self, row: Row) -> bool:
        return self.draw.random() < 0.005

    def _draft_rows(self, rows: list[Row]) -> list[Proposal]:
        return [Proposal.chain(self._guess_row(row), self.kind) for row in rows]

    def _guess_row(self, row: Row) -> list[int]:
        sequence, length = row.sequence, row.sequence.num_cached
        assert self.num_written(sequence.key) == length == len(sequence.token_ids) - 1
        token_ids = self.contexts.token_ids.read(sequence.key, length)
        held_at = self.contexts.places.read(sequence.key, length)
        known = self.contexts.positions(sequence.key, length)
        self.num_given_up += length - len(known)
        for position in known:
            assert token_ids[position] == sequence.token_ids[position]
            assert held_at[position] == position
        guesses = plain_output(sequence.token_ids, row.num_draft_tokens)
        return [g if self.draw.random() < 0.8 else 0 for g in guesses]


class RandomDepth(VerifyAll):
    """Any depth within the limits."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw

    def limit(
        self, rows: Sequence[Row], num_prompt_tokens: int, free: Sequence[Proposal]
    ) -> list[Row]:
        return [row.limited(self.draw.randint(0, max(0, row.num_draft_tokens))) for row in rows]


class Interrupted(Exception):
    """Whatever stops a step half way."""


class Traffic:
    """Random requests come to one engine, and some of them are cancelled."""

    def __init__(self, seed: int, num_pages: int, *, reuse: bool, drafts: bool) -> None:
        self.draw = random.Random(seed)
        self.pages = Pages(num_pages, reuse=reuse)
        drafter: Drafter = NoDrafter()
        if drafts:
            drafter = SlotDrafter(
                SlotContexts(self.pages, self.draw.choice([30, 300, 3000])), random.Random(seed)
            )
        self.engine = Engine(
            SlotTarget(self.pages),
            drafter,
            max_running=self.draw.choice([3, 8]),
            prefill_chunk=self.draw.choice([17, 64, 512]),
        )
        if seed % 2:
            self.engine.allocator.policy = RandomDepth(random.Random(seed))
        self.expected: dict[int, list[int]] = {}
        self.num_finished = self.num_cancelled = self.num_interrupted = self.num_failed = 0

    def add(self) -> None:
        """A prompt of known pages, a few tokens of its own, and an answer that may cross a page."""
        pages = [[self.draw.randrange(2)] * PAGE_SIZE for _ in range(self.draw.randrange(3))]
        own = [self.draw.randrange(2)] * self.draw.choice([0, 1, 2, 40, 60])
        prompt = [token_id for page in pages for token_id in page] + own or [3]
        most = self.draw.choice([None, None, 2, 0])
        params = SamplingParams(max_tokens=self.draw.randint(1, 90), num_draft_tokens=most)
        key = self.engine.add(prompt, params)
        self.expected[key] = plain_output(prompt, params.max_tokens)

    def step(self) -> None:
        try:
            self.engine.step()
        except Interrupted:
            self.num_interrupted += 1
        self.pages.check_integrity()
        # Not by what the step returned: an interrupted one may have ended sequences.
        for key in list(self.expected):
            sequence = self.engine.progress[key].sequence
            if sequence.finish_reason is None:
                continue
            output_ids, expected = self.engine.take(key).sequence.output_ids, self.expected.pop(key)
            if sequence.finish_reason == "error":  # its own commit failed
                assert repr(Interrupted()) in sequence.error
                assert output_ids == expected[: len(output_ids)]
                self.num_failed += 1
            else:
                assert output_ids == expected
                self.num_finished += 1

    def cancel(self) -> None:
        key = self.draw.choice(list(self.expected))
        output_ids = self.engine.take(key).sequence.output_ids
        assert output_ids == self.expected.pop(key)[: len(output_ids)]
        self.num_cancelled += 1
        self.pages.check_integrity()

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if len(self.expected) < 12 and self.draw.random() < 0.4:
                self.add()
            if self.expected and self.draw.random() < 0.02:
                self.cancel()
            if self.engine.has_work:
                self.step()
        while self.engine.has_work:
            self.step()


@pytest.mark.one_in(9)
@pytest.mark.parametrize("drafts", [True, False], ids=["drafted", "plain"])
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize(("seed", "num_pages"), [(0, 6), (1, 9), (2, 40), (3, 8)])
def test_no_page_is_lost(seed: int, num_pages: int, reuse: bool, drafts: bool) -> None:
    """Arrivals, cancels, preemptions, prefix hits and rejected drafts, for thousands of steps."""
    traffic = Traffic(seed, num_pages, reuse=reuse, drafts=drafts)
    traffic.run(NUM_STEPS)
    assert not traffic.expected
    assert traffic.pages.num_available == num_pages - 1
    assert traffic.engine.proposer.failures.num_failures == 0
    assert traffic.num_finished >= 25
    assert traffic.num_cancelled >= 4
    assert bool(traffic.pages.num_reused_tokens) == reuse
    assert traffic.engine.scheduler.num_preempted > 0 or num_pages == 40
    if drafts:
        assert not traffic.engine.drafter._known
        waiting = traffic.engine.drafter.contexts.waiting
        assert set(waiting._of) <= set(traffic.pages._digest_of)  # nobody holds any page now
        assert waiting.num_tokens == sum(map(len, waiting._of.values()))
        given_up = traffic.engine.drafter.contexts._given_up
        assert given_up <= set(traffic.pages._digest_of)
        assert traffic.engine.drafter.num_given_up > 0
        assert not given_up & set(waiting._of)


def test_all_but_the_anchor_of_a_preempted_sequence_is_taken_over() -> None:
    """It drafts at once, behind pages whose context somebody else wrote."""
    traffic = Traffic(0, 9, reuse=True, drafts=True)
    engine, prompt = traffic.engine, [1] * (PAGE_SIZE - 1)
    page = prompt + plain_output(prompt, 1)
    key = engine.add(prompt, SamplingParams(max_tokens=20))
    sequence = engine.progress[key].sequence
    while sequence.num_output < 2:
        engine.use_fixed_drafting(0)
        engine.step()
    assert len(sequence.token_ids) == PAGE_SIZE + 1
    engine.use_fixed_drafting(MAX_DRAFT_TOKENS)
    other = engine.add([*page, 0], SamplingParams(max_tokens=20))
    while engine.progress[other].sequence.finish_reason is None:
        engine.scheduler.running = [s for s in engine.scheduler.running if s.key != key]
        engine.step()
    engine.scheduler.preempt(sequence)
    while engine.has_work:
        engine.step()
    assert engine.proposer.failures.num_failures == 0
    assert traffic.pages.num_reused_tokens == 2 * PAGE_SIZE  # by the other, and back
    assert engine.take(key).sequence.output_ids == plain_output(prompt, 20)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_step_that_was_interrupted_loses_no_page(seed: int) -> None:
    """Before or after any phase, and half way through a commit."""
    traffic = Traffic(seed, 9, reuse=True, drafts=True)
    engine, draw = traffic.engine, random.Random(seed)

    def interrupting(method: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*args: object, **kwargs: object) -> object:
            if draw.random() < 0.02:
                raise Interrupted
            result = method(*args, **kwargs)
            if draw.random() < 0.02:
                raise Interrupted
            return result

        return wrapped

    phases = [
        (engine.target, ("forward", "keep", "truncate")),
        (engine.drafter, ("open", "propose", "committed")),
        (traffic.pages, ("publish",)),
    ]
    for owner, names in phases:
        for name in names:
            setattr(owner, name, interrupting(getattr(owner, name)))
    traffic.run(NUM_STEPS)
    # The target's failures are raised, the drafter's and those of a row alone are not.
    assert traffic.num_interrupted >= 30
    assert engine.proposer.failures.num_failures >= 30
    assert traffic.num_failed >= 5
    assert traffic.num_finished >= 25
    assert not traffic.expected
    assert not engine.drafter._known
    assert traffic.pages.num_available == 8
