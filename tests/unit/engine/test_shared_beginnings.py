"""Requests whose beginnings are equal, arriving together: the second waits for the first."""

import pytest

from blockdraft.cache import pages as pages_module
from blockdraft.cache.memory import Memory
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.engine.scheduler import Scheduler
from tests.samples import make_sample

NUM_PROMPT = 3 * PAGE_SIZE + 5


def make_scheduler(memory=None, *, draft_context=True):
    memory = memory or Pages(100)
    return Scheduler(
        memory,
        memory.close,
        max_running=8,
        prefill_chunk=2 * PAGE_SIZE,
        draft_context=draft_context,
    )


def add(scheduler, key, token_ids, **params):
    sequence = make_sample(token_ids, key=key, max_tokens=20, **params)
    scheduler.add(sequence)
    return sequence


def step(scheduler):
    """Schedule, and commit as the engine does; returns the new tokens of each sequence."""
    rows = {row.sequence.key: len(row.new_ids) for row in scheduler.schedule()}
    for sequence in scheduler.running:
        sequence.num_cached += rows[sequence.key]
        if sequence.num_cached == len(sequence.token_ids):
            scheduler.memory.publish(sequence.key, sequence.token_ids, sequence.num_cached)
            sequence.append(7)
    return rows


def num_shared(memory, first, second):
    memory.open(0, first, with_context=True)
    memory.open(1, second, with_context=True)
    return memory.num_shared(1, second, 0, first)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (range(200), range(200), 3 * PAGE_SIZE),
        (range(192), range(192), 2 * PAGE_SIZE),  # one token stays to be computed
        (range(192), range(300), 3 * PAGE_SIZE),
        (range(300), range(100), PAGE_SIZE),
        ([*range(100), -1], range(200), PAGE_SIZE),
        ([-1, *range(1, 200)], range(200), 0),
        (range(63), range(63), 0),
    ],
)
def test_what_is_shared_is_whole_pages(first, second, expected):
    first, second = list(first), list(second)
    assert num_shared(Pages(9), first, second) == expected
    assert num_shared(Pages(9, reuse=False), first, second) == 0
    assert num_shared(Memory(), first, second) == 0


def test_what_is_shared_is_what_is_taken_over():
    pages, prompt = Pages(9), list(range(200))
    pages.open(0, prompt, with_context=True)
    pages.reserve(0, 200)
    pages.publish(0, prompt, 200)
    num_reused = pages.open(1, prompt, with_context=True)
    assert num_reused == pages.num_shared(1, prompt, 0, prompt) == 3 * PAGE_SIZE


def test_pages_of_long_texts_are_not_shared_with_others():
    pages, prompt = Pages(9), list(range(200))
    pages.long_from = 300
    pages.open(0, prompt, with_context=True, longest=300)
    pages.open(1, prompt, with_context=True, longest=301)
    assert pages.num_shared(1, prompt, 0, prompt) == 0


@pytest.mark.parametrize("draft_context", [True, False])
def test_samples_of_one_prompt_compute_it_once(draft_context):
    scheduler = make_scheduler(draft_context=draft_context)
    for key in range(4):
        add(scheduler, key, range(NUM_PROMPT))
    assert step(scheduler) == {0: 2 * PAGE_SIZE}
    assert step(scheduler) == {0: PAGE_SIZE + 5}
    # The others take three pages over, and compute what is left of the prompt.
    assert step(scheduler) == {0: 1, 1: 5, 2: 5, 3: 5}
    scheduler.memory.check_integrity()


@pytest.mark.parametrize("memory", [Memory, lambda: Pages(100, reuse=False)])
def test_nobody_waits_where_nothing_is_reused(memory):
    scheduler = make_scheduler(memory())
    for key in range(2):
        add(scheduler, key, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0, 1}


def test_nobody_waits_for_pages_without_the_context_that_it_needs():
    scheduler = make_scheduler()
    add(scheduler, 0, range(NUM_PROMPT), num_draft_tokens=0)
    add(scheduler, 1, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0, 1}
    # A drafter that keeps no context makes no difference between them.
    scheduler = make_scheduler(draft_context=False)
    add(scheduler, 0, range(NUM_PROMPT), num_draft_tokens=0)
    add(scheduler, 1, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0}


@pytest.mark.parametrize("draft_context", [True, False])
def test_nobody_waits_for_pages_that_will_not_be_published(draft_context):
    """Whoever loses its draft context while its prompt is computed leaves nothing to take over."""
    scheduler = make_scheduler(draft_context=draft_context)
    first = add(scheduler, 0, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0}
    first.has_lost_context = True
    add(scheduler, 1, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0, 1}


def test_nobody_waits_for_a_prompt_that_is_much_longer_than_what_is_shared():
    shared = range(PAGE_SIZE)
    scheduler = make_scheduler()
    add(scheduler, 0, [*shared, *range(1000, 1000 + 2 * PAGE_SIZE)])
    add(scheduler, 1, [*shared, 1, 2])
    assert set(step(scheduler)) == {0, 1}
    scheduler = make_scheduler()
    add(scheduler, 0, [*shared, *range(1000, 1000 + PAGE_SIZE)])
    add(scheduler, 1, [*shared, 1, 2])
    assert set(step(scheduler)) == {0}


def test_who_waits_goes_on_when_the_other_one_is_gone():
    scheduler = make_scheduler()
    add(scheduler, 0, range(NUM_PROMPT))
    add(scheduler, 1, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0}
    scheduler.remove(0)
    scheduler.memory.close(0)
    assert step(scheduler) == {1: 2 * PAGE_SIZE}
    scheduler.memory.check_integrity()


def test_who_has_all_that_it_can_have_does_not_wait():
    scheduler = make_scheduler()
    add(scheduler, 0, range(NUM_PROMPT))
    for _ in range(3):
        step(scheduler)
    add(scheduler, 1, [*range(NUM_PROMPT), 1])
    add(scheduler, 2, [*range(NUM_PROMPT), 1])
    # The first three pages are there; what both lack is less than a page.
    assert step(scheduler) == {0: 1, 1: 6, 2: 6}


def test_only_who_shares_a_beginning_waits_for_it():
    scheduler = make_scheduler()
    add(scheduler, 0, range(NUM_PROMPT))
    add(scheduler, 1, range(NUM_PROMPT))
    add(scheduler, 2, range(5000, 5000 + NUM_PROMPT))
    add(scheduler, 3, range(NUM_PROMPT))
    assert set(step(scheduler)) == {0, 2}
    assert list(scheduler.waiting) == [1, 3]
    while scheduler.waiting:
        step(scheduler)
    assert [sequence.key for sequence in scheduler.running] == [0, 2, 1, 3]
    scheduler.memory.check_integrity()


def test_who_wants_logprobs_of_the_prompt_waits_for_nobody():
    """They come from its own forward, so it can take nothing over."""
    scheduler = make_scheduler()
    add(scheduler, 0, range(NUM_PROMPT))
    add(scheduler, 1, range(NUM_PROMPT), logprobs=0, prompt_logprobs=True)
    assert set(step(scheduler)) == {0, 1}


def test_who_waits_holds_no_pages():
    """Nor those that it could take over by now: others may need them first."""
    scheduler = make_scheduler()
    add(scheduler, 0, range(PAGE_SIZE + 1))
    step(scheduler)
    scheduler.remove(0)
    scheduler.memory.close(0)
    add(scheduler, 1, range(NUM_PROMPT))
    add(scheduler, 2, range(NUM_PROMPT))
    assert set(step(scheduler)) == {1}
    scheduler.memory.close(1)
    assert scheduler.memory.num_available == scheduler.memory.num_pages - 1


class Counted(list):
    """Tokens that count how many of them were read in slices."""

    num_read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if isinstance(place, slice):
            self.num_read += len(found)
        return found


def test_those_who_wait_for_a_long_prompt_do_not_read_it_again_in_each_step():
    num_prompt = 40 * PAGE_SIZE
    scheduler = make_scheduler(Pages(400))
    sequences = [add(scheduler, key, range(num_prompt)) for key in range(8)]
    for sequence in sequences:
        sequence.token_ids = Counted(sequence.token_ids)
    for _ in range(20):  # half of the prompt for each
        step(scheduler)
    assert len(scheduler.waiting) == 7
    for sequence in sequences[1:]:
        assert sequence.token_ids.num_read <= num_prompt
    step(scheduler)
    assert not scheduler.waiting


@pytest.mark.parametrize("draft_context", [True, False])
@pytest.mark.parametrize("waits_for", ["a beginning", "room"])
def test_who_waits_is_hashed_once(waits_for, draft_context, monkeypatch):
    memory = Pages(100 if waits_for == "a beginning" else 8)
    hashed, real = [], pages_module._next_digest

    def next_digest(digests, token_ids, index):
        hashed.append(index)
        return real(digests, token_ids, index)

    scheduler = make_scheduler(memory, draft_context=draft_context)
    add(scheduler, 5, range(200, 200 + NUM_PROMPT))
    add(scheduler, 6, range(200, 200 + NUM_PROMPT) if waits_for == "a beginning" else range(9999))
    monkeypatch.setattr(pages_module, "_next_digest", next_digest)

    def admit() -> None:
        scheduler._admit(list(scheduler.waiting.values()), scheduler.max_running)

    admit()
    num_hashed = len(hashed)
    assert num_hashed
    for _ in range(5):
        admit()
    assert len(hashed) == num_hashed
    for key in (5, 6):
        memory.close(key)
    assert not memory._put_back
    memory.check_integrity()


def test_a_sequence_that_was_put_back_is_hashed_anew_for_another_context():
    pages, prompt = Pages(9), list(range(200))
    pages.open(0, prompt, with_context=False)
    pages.reserve(0, 200)
    pages.publish(0, prompt, 200)
    assert pages.open(1, prompt, with_context=True) == 0
    pages.put_back(1)
    assert pages.open(1, prompt, with_context=False) == 3 * PAGE_SIZE
    pages.put_back(1)
    assert pages.open(1, prompt, with_context=True) == 0
    pages.close(1)
    pages.check_integrity()
