"""Pages alone: who holds which, what is shared, what goes first when memory is needed."""

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages


def page(content: int) -> list[int]:
    """The tokens of one whole page."""
    return [content] * PAGE_SIZE


def tokens(*contents: int) -> list[int]:
    """Whole pages, and one token more."""
    return [token_id for content in contents for token_id in page(content)] + [0]


def fill(
    pages: Pages, key: int, token_ids: list[int], *, with_context: bool = False, keep: bool = False
) -> list[int]:
    """Open a sequence, reserve, publish all of it, and close it unless `keep`; its page table."""
    pages.open(key, token_ids, with_context=with_context)
    assert pages.reserve(key, len(token_ids))
    pages.publish(key, token_ids, len(token_ids))
    table = list(pages.page_ids(key))
    if not keep:
        pages.close(key)
    pages.check_integrity()
    return table


def hits(pages: Pages, token_ids: list[int], *, with_context: bool = False) -> int:
    """How many tokens would be taken over."""
    found = pages.open(-7, token_ids, with_context=with_context)
    pages.close(-7)
    return found


def test_a_sequence_gets_as_many_pages_as_its_tokens_need() -> None:
    pages = Pages(5)
    assert pages.num_tokens == 4 * PAGE_SIZE
    assert pages.open(3, [1, 2, 3], with_context=False) == 0
    assert pages.room(3) == 0
    for num_tokens, num_pages in [(1, 1), (PAGE_SIZE, 1), (PAGE_SIZE + 1, 2), (1, 2)]:
        assert pages.reserve(3, num_tokens)
        assert len(pages.page_ids(3)) == num_pages
        assert pages.room(3) == num_pages * PAGE_SIZE
        assert pages.num_available == 4 - num_pages
        pages.check_integrity()
    pages.close(3)
    assert pages.num_available == 4
    pages.close(3)
    pages.close(99)
    pages.check_integrity()


def test_room_beyond_its_tokens_is_taken_back_from_a_sequence() -> None:
    pages = Pages(9)
    forgotten: list[int] = []
    pages.on_forget = forgotten.append
    token_ids = tokens(1)
    fill(pages, 0, token_ids, keep=True)
    assert pages.reserve(0, 7 * PAGE_SIZE)
    kept, surplus = list(pages.page_ids(0)[:2]), list(pages.page_ids(0)[2:])
    pages.trim(0, len(token_ids))
    assert list(pages.page_ids(0)) == kept
    assert sorted(forgotten) == sorted(surplus)
    assert pages.num_available == 6
    pages.trim(0, len(token_ids))  # nothing is left to take
    pages.trim(0, 5 * PAGE_SIZE)
    assert list(pages.page_ids(0)) == kept
    pages.check_integrity()
    pages.close(0)
    assert hits(pages, token_ids) == PAGE_SIZE


@pytest.mark.parametrize(
    ("work", "inner"),
    [
        (lambda pages: pages.open(1, tokens(1, 2), with_context=False), "_hold"),
        (lambda pages: pages.reserve(0, 5 * PAGE_SIZE), "_take"),
        (lambda pages: pages.trim(0, 2 * PAGE_SIZE), "_release"),
    ],
    ids=["open", "reserve", "trim"],
)
@pytest.mark.parametrize("comes", ["before", "behind"])
def test_an_interrupt_leaves_no_page_half_taken(
    work: Callable[[Pages], object], inner: str, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = Pages(9)
    shared = fill(pages, 0, tokens(1, 2), keep=True)
    pages.reserve(0, 4 * PAGE_SIZE)
    real = getattr(pages, inner)

    def interrupted(*page_ids: int) -> object:
        monkeypatch.undo()
        if comes == "before":
            signal.raise_signal(signal.SIGINT)
        found = real(*page_ids)
        if comes == "behind":
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(pages, inner, interrupted)
    with pytest.raises(KeyboardInterrupt):
        work(pages)
    pages.check_integrity()
    pages.put_back(1)
    pages.check_integrity()
    assert all(pages.is_held(page_id) for page_id in shared[:2])
    pages.close(0)
    assert pages.num_available == 8


def test_no_sequence_ever_gets_the_scratch_page() -> None:
    pages = Pages(9)
    assert sorted(fill(pages, 0, list(range(8 * PAGE_SIZE)))) == [
        i for i in range(9) if i != SCRATCH_PAGE
    ]


def test_a_reservation_that_fails_changes_nothing() -> None:
    pages = Pages(4)
    kept = fill(pages, 0, tokens(1))
    pages.open(1, [5], with_context=False)
    assert pages.reserve(1, PAGE_SIZE)
    table = list(pages.page_ids(1))
    assert not pages.reserve(1, 4 * PAGE_SIZE)
    assert list(pages.page_ids(1)) == table
    assert pages.num_available == 2
    assert hits(pages, tokens(1)) == PAGE_SIZE
    pages.open(2, tokens(1), with_context=False)
    assert list(pages.page_ids(2)) == kept[:1]
    pages.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (1, 0),
        (PAGE_SIZE - 1, 0),
        (PAGE_SIZE, 0),  # a hit on all of it drops its last page
        (PAGE_SIZE + 1, 1),
        (2 * PAGE_SIZE, 1),
        (2 * PAGE_SIZE + 1, 2),
        (3 * PAGE_SIZE, 2),
        (3 * PAGE_SIZE + 60, 3),
    ],
)
def test_whole_pages_are_taken_over_and_a_token_is_left(num_tokens: int, expected: int) -> None:
    pages = Pages(9)
    token_ids = [*page(1), *page(2), *page(3), *page(4)]
    table = fill(pages, 0, token_ids)
    assert pages.open(1, token_ids[:num_tokens], with_context=False) == expected * PAGE_SIZE
    assert list(pages.page_ids(1)) == table[:expected]
    assert pages.reserve(1, num_tokens)
    assert pages.num_reused_tokens == expected * PAGE_SIZE


def test_what_was_taken_over_counts_once_and_only_if_there_is_room() -> None:
    """A sequence that waits for memory is opened and sent away step by step."""
    pages, token_ids = Pages(4), tokens(1)
    fill(pages, 0, token_ids)
    for _ in range(3):
        assert pages.open(1, token_ids, with_context=False) == PAGE_SIZE
        assert not pages.reserve(1, 4 * PAGE_SIZE)
        pages.close(1)
    assert pages.num_reused_tokens == 0
    pages.open(1, token_ids, with_context=False)
    for num_pages in (2, 2, 3):
        assert pages.reserve(1, num_pages * PAGE_SIZE)
        assert pages.num_reused_tokens == PAGE_SIZE


def test_only_full_pages_of_committed_tokens_can_be_taken_over() -> None:
    pages, token_ids = Pages(9), tokens(1, 2, 3)
    pages.open(0, token_ids, with_context=False)
    assert pages.reserve(0, len(token_ids))
    for num_committed, expected in [(0, 0), (PAGE_SIZE - 1, 0), (PAGE_SIZE, 1), (130, 2), (129, 2)]:
        pages.publish(0, token_ids, num_committed)
        assert hits(pages, token_ids) == expected * PAGE_SIZE
        pages.check_integrity()


def test_a_page_counts_only_behind_the_pages_before_it() -> None:
    """The same tokens behind others have other keys and values."""
    pages = Pages(9)
    fill(pages, 0, tokens(1, 2))
    fill(pages, 1, tokens(3, 4))
    assert hits(pages, tokens(3, 2)) == PAGE_SIZE
    assert hits(pages, tokens(2)) == 0
    assert hits(pages, tokens(1, 2)) == 2 * PAGE_SIZE


def test_one_other_token_is_another_page() -> None:
    pages = Pages(9)
    fill(pages, 0, tokens(1, 2))
    for index in (0, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE - 1):
        changed = tokens(1, 2)
        changed[index] = 9
        assert hits(pages, changed) == index // PAGE_SIZE * PAGE_SIZE


def test_who_drafts_takes_no_pages_without_draft_context() -> None:
    pages = Pages(9)
    fill(pages, 0, tokens(1), with_context=False)
    assert hits(pages, tokens(1), with_context=True) == 0
    fill(pages, 1, tokens(2), with_context=True)
    assert hits(pages, tokens(2), with_context=True) == PAGE_SIZE


def test_who_does_not_draft_takes_any_pages() -> None:
    pages = Pages(9)
    shared = fill(pages, 0, tokens(1, 2), with_context=True)
    own = fill(pages, 1, tokens(1, 2, 3), with_context=False)
    assert own[:2] == shared[:2]
    # What it has added is its own kind.
    assert hits(pages, tokens(1, 2, 3), with_context=False) == 3 * PAGE_SIZE
    assert hits(pages, tokens(1, 2, 3), with_context=True) == 2 * PAGE_SIZE


def test_states_at_borders_are_of_one_kind_alone() -> None:
    class Borders:
        def has(self, digest: bytes) -> bool:
            return True

        def opened(self, key: int, digest: bytes | None, num_tokens: int) -> None:
            """Nothing is told of it here."""

    pages = Pages(9)
    pages.borders = Borders()
    fill(pages, 0, tokens(1), with_context=True)
    assert hits(pages, tokens(1), with_context=False) == 0


def test_without_reuse_nothing_is_kept() -> None:
    pages = Pages(9, reuse=False)
    fill(pages, 0, tokens(1, 2))
    assert hits(pages, tokens(1, 2)) == 0
    assert pages.num_reused_tokens == 0
    assert pages.num_available == 8


def test_a_page_that_another_one_stands_for_stays_its_owners() -> None:
    pages, token_ids = Pages(9), tokens(1, 2)
    for key in (0, 1):
        pages.open(key, token_ids, with_context=False)
        assert pages.reserve(key, len(token_ids))
    for key in (0, 1):
        pages.publish(key, token_ids, len(token_ids))
        pages.check_integrity()
    first, second = (set(pages.page_ids(key)) for key in (0, 1))
    assert not first & second
    pages.close(1)
    assert pages.num_available == 5
    pages.close(0)
    pages.check_integrity()
    assert hits(pages, token_ids) == 2 * PAGE_SIZE


def test_the_longest_unused_goes_first() -> None:
    """What lay beside it, such as a draft context, is of no use to its next owner."""
    pages, forgotten = Pages(5), list[int]()
    _, second, _ = (fill(pages, key, page(key)) for key in (1, 2, 3))
    fill(pages, 4, tokens(1))  # uses the first again
    pages.on_forget = forgotten.append
    pages.open(5, [0], with_context=False)
    assert pages.reserve(5, 2 * PAGE_SIZE)
    found = [hits(pages, tokens(content)) // PAGE_SIZE for content in (1, 2, 3)]
    assert found == [1, 0, 1]
    assert forgotten == second


def test_the_end_of_a_chain_goes_before_its_beginning() -> None:
    pages = Pages(5)
    fill(pages, 0, tokens(1, 2, 3))
    for num_taken in (2, 3, 4):
        pages.open(9, [0], with_context=False)
        assert pages.reserve(9, num_taken * PAGE_SIZE)
        assert hits(pages, tokens(1, 2, 3)) == (4 - num_taken) * PAGE_SIZE
        pages.close(9)
        pages.check_integrity()


def test_what_is_held_is_neither_evicted_nor_given_to_others() -> None:
    pages = Pages(5)
    table = fill(pages, 0, [*page(1), *page(2)], keep=True)
    assert pages.open(1, tokens(1, 2), with_context=False) == 2 * PAGE_SIZE
    pages.close(0)
    assert pages.reserve(1, 4 * PAGE_SIZE)
    assert list(pages.page_ids(1))[:2] == table
    assert len(set(pages.page_ids(1))) == 4
    pages.open(2, [0], with_context=False)
    assert not pages.reserve(2, 1)
    pages.check_integrity()


def test_a_beginning_computed_anew_finds_its_continuation_again() -> None:
    """The end of a chain may outlive its beginning while somebody holds it."""
    pages = Pages(6)
    pages.open(0, tokens(1, 2), with_context=False)
    pages.reserve(0, 2 * PAGE_SIZE)
    fill(pages, 1, page(1))  # stands for the first page
    pages.publish(0, tokens(1, 2), 2 * PAGE_SIZE)
    pages.open(2, [0], with_context=False)
    assert pages.reserve(2, 3 * PAGE_SIZE)  # evicts it
    assert hits(pages, tokens(1, 2)) == 0
    pages.close(2)
    fill(pages, 3, page(1))
    assert hits(pages, tokens(1, 2)) == 2 * PAGE_SIZE
    pages.check_integrity()


def held() -> Pages:
    """Two sequences that share a page, an idle page and free ones."""
    pages = Pages(9)
    fill(pages, 9, page(5))
    fill(pages, 0, tokens(1, 2), keep=True)
    fill(pages, 1, tokens(1, 3), keep=True)
    return pages


def lose_a_free_page(pages: Pages) -> None:
    pages._free.pop()


def lose_a_held_page(pages: Pages) -> None:
    page_id = pages._tables[0].page_ids.pop()
    pages._num_holders[page_id] = 0


def put_a_page_in_two_tables(pages: Pages) -> None:
    """A page that is not in the chain, so that both would write to it."""
    page_id = pages._tables[0].page_ids[-1]
    pages._tables[1].page_ids[-1], freed = page_id, pages._tables[1].page_ids[-1]
    pages._num_holders[page_id] += 1
    pages._num_holders[freed] = 0
    pages._free.append(freed)


def count_one_too_many(pages: Pages) -> None:
    pages._num_holders[pages._tables[0].page_ids[0]] += 1


def give_out_a_held_page(pages: Pages) -> None:
    pages._free.append(pages._tables[0].page_ids[0])


def hold_the_scratch_page(pages: Pages) -> None:
    pages._free.append(SCRATCH_PAGE)


def forget_a_digest(pages: Pages) -> None:
    del pages._digest_of[pages._tables[0].page_ids[0]]


def keep_a_page_that_nothing_finds(pages: Pages) -> None:
    pages._idle[pages._free.pop()] = None


def free_a_page_of_the_chain(pages: Pages) -> None:
    page_id, _ = pages._idle.popitem()
    pages._free.append(page_id)


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_free_page,
        lose_a_held_page,
        put_a_page_in_two_tables,
        count_one_too_many,
        give_out_a_held_page,
        hold_the_scratch_page,
        forget_a_digest,
        keep_a_page_that_nothing_finds,
        free_a_page_of_the_chain,
    ],
)
def test_the_check_of_integrity_finds(damage: object) -> None:
    pages = held()
    pages.check_integrity()
    damage(pages)
    with pytest.raises(AssertionError):
        pages.check_integrity()


@dataclass
class Naive:
    """What is known of the sequences, and of what pages hold; nothing about who was used when."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_published: dict[int, int] = field(default_factory=dict)
    domains: dict[int, bool] = field(default_factory=dict)
    content: dict[int, tuple[bool, tuple[int, ...]]] = field(default_factory=dict)
    """By page: the tokens up to its end that it was written for, and whether with draft context."""


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_against_a_naive_model(seed: int) -> None:
    """Whatever is taken over was written for just these tokens; no held page changes hands."""
    draw, pages, naive = random.Random(seed), Pages(14), Naive()
    num_hits = num_failures = num_evictions = num_trims = 0
    for step in range(5000):
        action = draw.choice(["open", "grow", "grow", "publish", "close", "draft", "trim"])
        if action == "open" and len(naive.tokens) < 6:
            num_hits += _open(draw, pages, naive, step)
        elif naive.tokens:
            key = draw.choice(list(naive.tokens))
            if action == "close":
                pages.close(key)
                for known in (naive.tokens, naive.num_published, naive.domains):
                    del known[key]
            elif action == "publish":
                _publish(draw, pages, naive, key)
            elif action == "draft" and pages.room(key) >= len(naive.tokens[key]):
                pages.reserve(key, len(naive.tokens[key]) + draw.randrange(3 * PAGE_SIZE))
            elif action == "trim":
                before = list(pages.page_ids(key))
                pages.trim(key, len(naive.tokens[key]))
                num_kept = min(len(before), -(-len(naive.tokens[key]) // PAGE_SIZE))
                num_trims += num_kept < len(before)
                assert list(pages.page_ids(key)) == before[:num_kept]
            elif action == "grow":
                num_free = len(pages._free)
                num_new = _grow(draw, pages, naive, key)
                num_failures += num_new is None
                num_evictions += num_new is not None and num_new > num_free
        pages.check_integrity()
        _check_tables(pages, naive)
    assert min(num_hits, num_failures, num_evictions, num_trims) >= 20
    for key in list(naive.tokens):
        pages.close(key)
    assert pages.num_available == 13


def _open(draw: random.Random, pages: Pages, naive: Naive, key: int) -> int:
    """The number of pages that were taken over."""
    contents = [draw.randrange(2) for _ in range(draw.randrange(5))]
    token_ids = [*(t for c in contents for t in page(c)), *[7] * draw.randrange(1, PAGE_SIZE)]
    with_context = draw.random() < 0.5
    num_found = pages.open(key, token_ids, with_context=with_context)
    assert num_found % PAGE_SIZE == 0
    assert num_found < len(token_ids)
    for index, page_id in enumerate(pages.page_ids(key)):
        content = tuple(token_ids[: (index + 1) * PAGE_SIZE])
        has_context, written = naive.content[page_id]
        assert written == content
        assert has_context or not with_context
    naive.tokens[key], naive.domains[key] = token_ids, with_context
    naive.num_published[key] = num_found
    return num_found // PAGE_SIZE


def _grow(draw: random.Random, pages: Pages, naive: Naive, key: int) -> int | None:
    """Reserve, and write what is not shared; the number of new pages, None if there are none."""
    before, available = list(pages.page_ids(key)), pages.num_available
    token_ids = naive.tokens[key] + page(draw.randrange(2)) * draw.randrange(2)
    num_new = max(0, -(-len(token_ids) // PAGE_SIZE) - len(before))
    granted = pages.reserve(key, len(token_ids))
    assert granted == (num_new <= available)
    after = list(pages.page_ids(key))
    if not granted:
        assert after == before
        assert pages.num_available == available
        return None
    assert after[: len(before)] == before
    assert len(after) == len(before) + num_new
    others = {i for other in naive.tokens if other != key for i in pages.page_ids(other)}
    assert not set(after[len(before) :]) & (others | {SCRATCH_PAGE})
    naive.tokens[key] = token_ids
    for index in range(naive.num_published[key] // PAGE_SIZE, len(after)):
        content = tuple(token_ids[: (index + 1) * PAGE_SIZE])
        naive.content[after[index]] = (naive.domains[key], content)
    return num_new


def _publish(draw: random.Random, pages: Pages, naive: Naive, key: int) -> None:
    most = min(len(naive.tokens[key]), pages.room(key))
    num_tokens = draw.randint(0, most)
    pages.publish(key, naive.tokens[key], num_tokens)
    published = max(naive.num_published[key], num_tokens // PAGE_SIZE * PAGE_SIZE)
    naive.num_published[key] = published


def _check_tables(pages: Pages, naive: Naive) -> None:
    for key, token_ids in naive.tokens.items():
        for index in range(naive.num_published[key] // PAGE_SIZE):
            has_context, content = naive.content[pages.page_ids(key)[index]]
            assert content == tuple(token_ids[: (index + 1) * PAGE_SIZE])
            assert has_context or not naive.domains[key]
