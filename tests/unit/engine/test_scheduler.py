"""Who runs in a step, who waits, who is preempted, and how much each may draft."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from blockdraft.allocation.allocator import Allocator
from blockdraft.allocation.policy import VerifyAll
from blockdraft.cache.memory import Memory
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.plan import NOTHING
from blockdraft.core.sequence import Row, Sequence
from blockdraft.engine.candidate_limits import CandidateLimits
from blockdraft.engine.scheduler import MIN_CHUNK, Scheduler
from tests.samples import make_sample


def make_sequence(
    key: int, num_prompt: int = 3, num_output: int = 0, first_id: int = 0, **params: object
) -> Sequence:
    end = first_id + num_prompt
    prompt, output = range(first_id, end), range(end, end + num_output)
    return make_sample(prompt, output, key=key, **{"max_tokens": 20, **params})


def make_scheduler(
    memory: Memory | None = None,
    release: Callable[[Sequence], None] | None = None,
    **changes: Any,
) -> Scheduler:
    memory = memory or Memory()
    options: dict[str, Any] = {"max_running": 2, "prefill_chunk": 4, "draft_context": False}

    def close(sequence: Sequence) -> None:
        memory.close(sequence.key)

    return Scheduler(memory, release or close, **(options | changes))


def make_limits(scheduler: Scheduler, **changes: Any) -> CandidateLimits:
    options: dict[str, Any] = {"model_depth": 7, "model_kind": "dflash"}
    options["free_depth"] = lambda sequence: 0
    return CandidateLimits(scheduler.memory, **(options | changes))


def start(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Let sequences begin that have some output already, as if their prompts had run."""
    for sequence in sequences:
        scheduler.add(sequence)
    assert len(scheduler.schedule()) == len(sequences)
    for sequence in sequences:
        sequence.num_cached = len(sequence.token_ids) - 1


def advance(row: Row, num_kept: int = 0) -> None:
    """What a commit does that keeps so many drafts: token ids are of no interest here."""
    sequence = row.sequence
    if not row.is_complete:
        sequence.num_cached += len(row.new_ids)
        return
    for _ in range(num_kept + 1):
        if sequence.finish_reason is None:
            sequence.append(len(sequence.token_ids) % 7)
    sequence.num_cached = len(sequence.token_ids) - 1


def test_first_come_first_served_and_ends_make_room() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(key) for key in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert [row.sequence.key for row in scheduler.schedule()] == [0, 1]
    sequences[0].finish_reason = "stop"
    assert [row.sequence.key for row in scheduler.schedule()] == [1, 2]
    scheduler.remove(1)
    scheduler.remove(3)
    scheduler.remove(99)
    assert [row.sequence.key for row in scheduler.schedule()] == [2]
    assert scheduler.has_work
    sequences[2].finish_reason = "length"
    assert not scheduler.has_work
    assert scheduler.schedule() == []


def test_a_prompt_goes_in_chunks_and_drafts_nothing() -> None:
    scheduler, sequence = make_scheduler(), make_sequence(0, num_prompt=9)
    scheduler.add(sequence)
    chunks = []
    while sequence.num_cached < 9:
        (row,) = scheduler.schedule()
        assert row.num_draft_tokens == 0
        assert row.is_prompt
        chunks.append((row.new_ids, row.is_complete))
        sequence.num_cached += len(row.new_ids)
    assert chunks == [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8], True)]


@pytest.mark.parametrize(
    ("num_output", "most", "expected"),
    [
        (1, None, 7),
        (1, 3, 3),
        (1, 100, 7),
        (1, 0, 0),
        (12, None, 7),
        (13, None, 6),
        (18, None, 1),
        (19, None, 0),
        (18, 5, 1),
    ],
)
def test_nothing_is_drafted_past_the_last_token(
    num_output: int, most: int | None, expected: int
) -> None:
    scheduler = make_scheduler()
    start(scheduler, make_sequence(0, num_output=num_output, num_draft_tokens=most))
    (plain,) = scheduler.schedule()
    (row,) = make_limits(scheduler).apply([plain])
    assert (plain.num_draft_tokens, row.num_draft_tokens) == (0, expected)
    assert row.new_ids == [row.sequence.token_ids[-1]]
    assert row.is_complete
    assert not row.is_prompt


def test_prompts_that_share_a_step_share_the_chunk_and_each_gets_a_little() -> None:
    for num, expected in ((1, 100), (2, 50), (3, 33), (5, MIN_CHUNK)):
        scheduler = make_scheduler(max_running=8, prefill_chunk=100)
        for key in range(num):
            scheduler.add(make_sequence(key, num_prompt=200))
        assert [len(row.new_ids) for row in scheduler.schedule()] == [expected] * num
    # A chunk that was asked for is never exceeded.
    small = make_scheduler(max_running=8, prefill_chunk=MIN_CHUNK // 2)
    small.add(make_sequence(0, num_prompt=200))
    assert [len(row.new_ids) for row in small.schedule()] == [MIN_CHUNK // 2]


def test_sequences_that_decode_do_not_take_of_the_chunk() -> None:
    scheduler = make_scheduler(max_running=8, prefill_chunk=100)
    start(scheduler, *(make_sequence(key, num_output=2) for key in range(3)))
    scheduler.add(make_sequence(3, num_prompt=200))
    assert [len(row.new_ids) for row in scheduler.schedule()] == [1, 1, 1, 100]


class Halving(VerifyAll):
    """Lets each sequence draft half of what it may, and writes down what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[list[tuple[int, int]], int]] = []

    def limit(self, rows: Any, num_prompt_tokens: int, free: Any) -> list[Row]:
        asked = [(row.sequence.key, row.num_draft_tokens) for row in rows]
        self.asked.append((asked, num_prompt_tokens))
        return [row.limited(row.num_draft_tokens // 2) for row in rows]


def test_the_policy_is_asked_about_the_sequences_that_decode() -> None:
    policy = Halving()
    scheduler = make_scheduler(max_running=4, prefill_chunk=40)
    allocator = Allocator(policy, takes_trees=True)
    plain = make_sequence(2, num_output=2, num_draft_tokens=0)
    start(
        scheduler,
        make_sequence(0, num_output=2),
        make_sequence(1, num_output=2, num_draft_tokens=3),
        plain,
    )
    scheduler.add(make_sequence(3, num_prompt=90))
    rows = make_limits(scheduler).apply(scheduler.schedule())
    assert [row.num_draft_tokens for row in rows] == [7, 3, 0, 0]
    rows = allocator.limit(rows, [NOTHING] * len(rows))
    assert policy.asked == [([(0, 7), (1, 3), (2, 0)], 40)]
    assert [row.for_model().num_draft_tokens for row in rows] == [3, 1, 0, 0]
    assert [row.is_prompt for row in rows] == [False, False, False, True]


def test_what_is_reused_must_hold_the_draft_context_only_if_there_is_one() -> None:
    for draft_context, most, expected in (
        (True, None, True),
        (True, 0, False),
        (False, None, False),
    ):
        opened: list[bool] = []

        class Noting(Memory):
            def open(
                self,
                key: int,
                token_ids: Any,
                *,
                with_context: bool,
                longest: int = 0,
                opened: list[bool] = opened,
            ) -> int:
                opened.append(with_context)
                return 0

        scheduler = make_scheduler(Noting(), draft_context=draft_context)
        scheduler.add(make_sequence(0, num_draft_tokens=most))
        scheduler.schedule()
        assert opened == [expected]


def test_a_prompt_starts_behind_what_is_reused() -> None:
    pages = Pages(9)
    scheduler = make_scheduler(pages, prefill_chunk=512)
    scheduler.add(make_sequence(0, num_prompt=2 * PAGE_SIZE + 5))
    (row,) = scheduler.schedule()
    advance(row)
    pages.publish(0, row.sequence.token_ids, row.sequence.num_cached)
    scheduler.add(make_sequence(1, num_prompt=2 * PAGE_SIZE + 5))
    _, row = scheduler.schedule()
    assert (row.sequence.num_cached, len(row.new_ids), row.is_prompt) == (2 * PAGE_SIZE, 5, True)
    pages.check_integrity()


def test_nobody_starts_without_room_for_the_whole_prompt() -> None:
    """First come, first served: a shorter one behind it waits, too."""
    pages = Pages(4)
    scheduler = make_scheduler(pages, max_running=8)
    for key, num_prompt in enumerate((70, 2 * PAGE_SIZE, 3)):
        scheduler.add(make_sequence(key, num_prompt=num_prompt, first_id=1000 * key))
    (row,) = scheduler.schedule()
    assert list(scheduler.waiting) == [1, 2]
    pages.check_integrity()
    row.sequence.finish_reason = "stop"
    pages.close(0)
    assert [row.sequence.key for row in scheduler.schedule()] == [1, 2]


def test_an_interrupt_while_one_starts_lets_it_start_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages = Pages(4)
    scheduler = make_scheduler(pages)
    scheduler.add(make_sequence(0))

    def interrupted(key: int, num_tokens: int) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pages, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scheduler.schedule()
    assert [row.sequence.key for row in scheduler.schedule()] == [0]
    pages.check_integrity()


def test_the_youngest_is_preempted_and_is_the_first_to_come_back() -> None:
    pages, released = Pages(4), []

    def release(sequence: Sequence) -> None:
        released.append(sequence.key)
        pages.close(sequence.key)

    scheduler = make_scheduler(pages, release, max_running=3)
    oldest, middle, youngest = (
        make_sequence(key, num_prompt=PAGE_SIZE - 2 - key, num_output=2, max_tokens=99)
        for key in range(3)
    )
    start(scheduler, oldest, middle, youngest)
    scheduler.add(make_sequence(3))
    oldest.append(5)
    rows = scheduler.schedule()
    assert [row.sequence.key for row in rows] == [0, 1]
    assert released == [2]
    assert scheduler.num_preempted == 1
    assert list(scheduler.waiting) == [2, 3]
    assert (youngest.num_cached, youngest.num_output) == (0, 2)
    # Its prompt and its output come back as one prompt, and a token is chosen at the end only.
    oldest.finish_reason = "stop"
    pages.close(0)
    (_, row, _) = scheduler.schedule()
    assert row.sequence is youngest
    assert (row.new_ids, row.is_prompt, row.is_complete) == (youngest.token_ids[:4], True, False)
    pages.check_integrity()


def test_what_a_preempted_one_takes_over_of_itself_is_not_reused() -> None:
    """Its pages are still there when it comes back; no earlier request has saved it anything."""
    pages = Pages(9)
    scheduler = make_scheduler(pages, prefill_chunk=512)
    sequence = make_sequence(0, num_prompt=2 * PAGE_SIZE + 5)
    scheduler.add(sequence)
    (row,) = scheduler.schedule()
    advance(row)
    pages.publish(0, sequence.token_ids, sequence.num_cached)
    scheduler.preempt(sequence)
    (row,) = scheduler.schedule()
    assert (row.sequence, sequence.num_cached) == (sequence, 2 * PAGE_SIZE)
    assert sequence.num_reused == 0


def test_nobody_is_preempted_for_drafts() -> None:
    pages = Pages(3)
    scheduler = make_scheduler(pages, max_running=2)
    start(
        scheduler,
        make_sequence(0, num_prompt=PAGE_SIZE - 5, num_output=1),
        make_sequence(1, num_prompt=PAGE_SIZE - 2, num_output=1),
    )
    # Four slots and one are left behind the tokens of each.
    rows = make_limits(scheduler).apply(scheduler.schedule())
    assert [row.num_draft_tokens for row in rows] == [4, 1]
    assert scheduler.num_preempted == 0
    pages.check_integrity()


def with_a_large_tree(pages: Pages) -> tuple[Scheduler, CandidateLimits, Sequence]:
    """A short sequence that has had room for so many candidates that no page is free."""
    scheduler = make_scheduler(pages)
    limits = make_limits(scheduler)
    limits.num_tree_nodes = (pages.num_pages - 1) * PAGE_SIZE - 10
    short = make_sequence(0, num_output=1, max_tokens=99)
    start(scheduler, short)
    limits.apply(scheduler.schedule())
    assert pages.num_available == 0
    return scheduler, limits, short


def test_nobody_waits_for_room_that_another_has_for_candidates_alone() -> None:
    pages = Pages(9)
    scheduler, limits, short = with_a_large_tree(pages)
    scheduler.add(make_sequence(1, num_prompt=6 * PAGE_SIZE))
    rows = limits.apply(scheduler.schedule())
    assert [row.sequence.key for row in rows] == [0, 1]
    # What is left is for candidates again, where they all have room.
    assert pages.room(0) == PAGE_SIZE
    assert rows[0].num_draft_tokens == PAGE_SIZE - len(short.token_ids)
    pages.check_integrity()


def test_nobody_is_preempted_for_room_that_another_has_for_candidates_alone() -> None:
    pages = Pages(9)
    scheduler, limits, _ = with_a_large_tree(pages)
    growing = make_sequence(1, num_prompt=PAGE_SIZE - 1, num_output=1, first_id=500, max_tokens=99)
    scheduler.add(growing)
    limits.apply(scheduler.schedule())
    growing.num_cached = PAGE_SIZE - 1
    for num_tokens in range(PAGE_SIZE + 1, PAGE_SIZE + 9):
        growing.append(5)
        growing.num_cached = num_tokens - 1
        rows = limits.apply(scheduler.schedule())
        assert [row.sequence.key for row in rows] == [0, 1]
        assert scheduler.num_preempted == 0
    pages.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_everybody_finishes_whatever_the_memory(seed: int) -> None:
    """Random lengths, acceptance and cancellations; the fewest pages that every one alone fits."""
    draw = random.Random(seed)
    pages = Pages(draw.choice([4, 5, 9]), reuse=draw.random() < 0.7)
    scheduler = make_scheduler(
        pages,
        max_running=draw.choice([1, 3, 8]),
        prefill_chunk=draw.choice([7, 64, 512]),
    )
    limits = make_limits(scheduler, model_depth=draw.choice([0, 7, 15]))
    sequences = []
    for key in range(12):
        num_prompt = draw.randint(1, 2 * PAGE_SIZE)
        max_tokens = draw.randint(1, 3 * PAGE_SIZE - num_prompt)
        sequences.append(make_sequence(key, num_prompt, max_tokens=max_tokens))
        scheduler.add(sequences[-1])
    cancelled = draw.sample(range(12), 2)
    for num_steps in range(3000):
        if not scheduler.has_work:
            break
        rows = scheduler.schedule()
        assert rows
        if draw.random() < 0.9:  # some steps are plain
            rows = limits.apply(rows)
        for row in rows:
            sequence = row.sequence
            end = sequence.num_cached + len(row.new_ids) + row.num_draft_tokens
            assert end <= pages.room(sequence.key)
            assert row.num_draft_tokens < max(1, sequence.params.max_tokens - sequence.num_output)
            advance(row, draw.randint(0, row.num_draft_tokens))
            pages.publish(sequence.key, sequence.token_ids, sequence.num_cached)
            if sequence.finish_reason:
                pages.close(sequence.key)
        if num_steps % 20 == 19 and cancelled:
            key = cancelled.pop()
            scheduler.remove(key)
            pages.close(key)
            sequences[key].finish_reason = sequences[key].finish_reason or "stop"
        pages.check_integrity()
    assert not scheduler.has_work
    assert all(sequence.finish_reason for sequence in sequences)
    assert pages.num_available == pages.num_pages - 1


def test_a_model_that_a_request_does_not_name_is_not_counted_on() -> None:
    scheduler = make_scheduler()
    limits = make_limits(scheduler, free_depth=lambda sequence: 4)
    limits.num_tree_nodes = 15
    named = make_sequence(0, num_output=1, drafters=("lookup", "dflash"))
    others = make_sequence(1, num_output=1, drafters=("lookup",))
    start(scheduler, named, others)
    rows = limits.apply(scheduler.schedule())
    assert [row.num_model_tokens for row in rows] == [15, 0]
    assert [row.max_model_depth for row in rows] == [7, 0]
    assert [row.num_draft_tokens for row in rows] == [15, 15]
    assert [row.max_depth for row in rows] == [7, 4]


def test_short_paths_without_a_model_may_branch_where_there_are_trees() -> None:
    scheduler = make_scheduler()
    limits = make_limits(scheduler, model_depth=0, free_depth=lambda sequence: 8)
    start(scheduler, make_sequence(0, num_output=1, draft_depth=2))
    (chain,) = limits.apply(scheduler.schedule())
    limits.num_tree_nodes = 15
    (tree,) = limits.apply(scheduler.schedule())
    assert [chain.max_depth, chain.num_draft_tokens] == [2, 2]
    assert [tree.max_depth, tree.num_draft_tokens] == [2, 15]


def test_a_tree_has_no_more_nodes_than_request_and_configuration_allow() -> None:
    scheduler = make_scheduler()
    limits = make_limits(scheduler)
    limits.num_tree_nodes = 15
    start(
        scheduler,
        make_sequence(0, num_output=1),
        make_sequence(1, num_output=1, num_draft_tokens=3),
    )
    rows = limits.apply(scheduler.schedule())
    assert [(row.num_draft_tokens, row.max_depth) for row in rows] == [(15, 7), (3, 3)]
    limits.num_draft_tokens, limits.draft_depth = 4, 2
    rows = limits.apply(scheduler.schedule())
    assert [(row.num_draft_tokens, row.max_depth) for row in rows] == [(4, 2), (3, 2)]


def test_a_sequence_alone_starts_beyond_the_places_and_starts_no_other() -> None:
    scheduler = make_scheduler()
    for key in range(4):
        scheduler.add(make_sequence(key, first_id=100 * key))
    scheduler.schedule()
    assert [row.sequence.key for row in scheduler.schedule_alone(1)] == [1]
    assert [row.sequence.key for row in scheduler.schedule_alone(3)] == [3]
    assert list(scheduler.waiting) == [2]
    assert scheduler.schedule_alone(9) == []
    scheduler.running[0].finish_reason = "stop"
    assert scheduler.schedule_alone(0) == []


def test_a_sequence_alone_without_room_is_not_advanced_and_preempts_none() -> None:
    pages = Pages(3)
    scheduler = make_scheduler(pages, prefill_chunk=512)
    sequences = [
        make_sequence(key, num_prompt=PAGE_SIZE - 2, num_output=2, first_id=1000 * key)
        for key in range(2)
    ]
    start(scheduler, *sequences)
    sequences[0].append(5)
    assert scheduler.schedule_alone(0) == []
    assert [row.sequence.key for row in scheduler.schedule_alone(1)] == [1]
    assert scheduler.num_preempted == 0
    assert scheduler.running == sequences
    pages.check_integrity()
