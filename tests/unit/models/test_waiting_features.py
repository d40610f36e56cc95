"""Features wait for whoever drafts from them, in bounded memory."""

import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.models.draft.context import ContextSpan
from blockdraft.models.draft.paged_context import WAITING_SHARE, PagedContexts
from blockdraft.models.draft.waiting_features import Waiting, WaitingFeatures
from blockdraft.speculate.drafters.lazy_context import _pieces
from tests.tiny import tiny_drafter

MODEL = tiny_drafter(torch.float32)


def features(start: int, end: int) -> Tensor:
    """Each token's features are its position."""
    return torch.arange(start, end)[:, None].expand(-1, 3).float()


def open_contexts(num_pages: int, num_tokens: int) -> PagedContexts:
    contexts = PagedContexts(MODEL.config, Pages(num_pages), MODEL.fc.weight)
    contexts.pages.open(1, [0], with_context=True)
    assert contexts.pages.reserve(1, num_tokens)
    return contexts


def keep_and_write(contexts: PagedContexts, num_tokens: int) -> None:
    """The first tokens of sequence 1."""
    contexts.keep(1, 0, features(0, num_tokens))
    needed = contexts.needed(ContextSpan(1, 0, num_tokens))
    zeros = torch.zeros(1, MODEL.config.num_key_value_heads, num_tokens, MODEL.config.head_dim)
    contexts.write(needed, [(zeros, zeros)] * MODEL.config.num_hidden_layers)


def test_features_wait_in_the_pages_of_their_tokens() -> None:
    contexts = open_contexts(8, 300)
    for start, end in ((0, 10), (10, 64), (64, 70), (70, 250)):
        contexts.keep(1, start, features(start, end))
    needed = contexts.needed(ContextSpan(1, 0, 250))
    assert [(w.start, w.end) for w in needed] == [(0, 64), (64, 128), (128, 192), (192, 250)]
    assert [w.holder for w in needed] == list(contexts.pages.page_ids(1))[:4]
    for waiting in needed:
        assert torch.equal(torch.cat(waiting.parts), features(waiting.start, waiting.end))
    assert contexts.needed(ContextSpan(1, 130, 190)) == [needed[2]]
    assert contexts.waiting.num_tokens == 250


def test_what_was_written_waits_no_longer_and_what_comes_behind_it_does() -> None:
    contexts = open_contexts(8, 200)
    keep_and_write(contexts, 100)
    assert contexts.waiting.num_tokens == 0
    contexts.keep(1, 100, features(100, 140))
    needed = contexts.needed(ContextSpan(1, 100, 140))
    assert [(w.start, w.end) for w in needed] == [(100, 128), (128, 140)]


def test_what_nobody_can_reach_does_not_wait() -> None:
    contexts = open_contexts(4, 3 * PAGE_SIZE)
    ids = list(range(3 * PAGE_SIZE))
    contexts.keep(1, 0, features(0, 2 * PAGE_SIZE + 5))
    contexts.pages.publish(1, ids, 2 * PAGE_SIZE)
    contexts.pages.close(1)
    # Two pages stay in the prefix chain, and their features with them.
    assert contexts.waiting.num_tokens == 2 * PAGE_SIZE
    assert contexts.pages.open(2, ids, with_context=True) == 2 * PAGE_SIZE
    assert len(contexts.needed(ContextSpan(2, 0, 2 * PAGE_SIZE))) == 2
    contexts.pages.close(2)
    contexts.pages.open(3, [7], with_context=True)
    assert contexts.pages.reserve(3, 3 * PAGE_SIZE)
    assert contexts.waiting.num_tokens == 0


def test_the_oldest_are_due_when_too_many_wait() -> None:
    waiting = WaitingFeatures(limit=10)
    for holder in (5, 3, 9):
        waiting.keep(holder, 0, features(0, 4))
    assert [one.holder for one in waiting.excess()] == [5]
    waiting.drop(5)
    assert waiting.excess() == []
    waiting.keep(3, 4, features(4, 11))
    assert [one.holder for one in waiting.excess()] == [3]


def test_of_too_many_those_that_nobody_is_likely_to_draft_from_are_given_up() -> None:
    contexts = open_contexts(8, 2 * PAGE_SIZE)
    ids = list(range(2 * PAGE_SIZE))
    contexts.keep(1, 0, features(0, 2 * PAGE_SIZE))
    contexts.pages.publish(1, ids, 2 * PAGE_SIZE)
    contexts.waiting.limit = 10
    first, second = contexts.pages.page_ids(1)
    assert [one.holder for one in contexts.excess()] == [first, second]  # they are held
    # Another sequence begins with the first page only, and both end.
    assert contexts.pages.open(2, [*ids[:PAGE_SIZE], 7], with_context=True) == PAGE_SIZE
    contexts.reused(2, PAGE_SIZE)
    for key in (1, 2):
        contexts.pages.close(key)
    assert [one.holder for one in contexts.excess()] == [first]
    assert contexts.waiting.num_tokens == PAGE_SIZE
    assert contexts.pages.open(3, [*ids, 7], with_context=True) == 2 * PAGE_SIZE
    assert contexts.positions(3, 2 * PAGE_SIZE) == list(range(PAGE_SIZE))
    # What takes the memory over has a context again.
    contexts.pages.close(3)
    contexts.pages.open(4, [9], with_context=True)
    assert contexts.pages.reserve(4, 7 * PAGE_SIZE)
    assert contexts.positions(4, 7 * PAGE_SIZE) == range(7 * PAGE_SIZE)


def test_a_sequence_goes_on_without_a_page_that_was_given_up() -> None:
    contexts = open_contexts(8, 300)
    contexts.keep(1, 0, features(0, 70))
    contexts.give_up(1, 70, 71)
    assert not contexts.may_draft(1, 71)
    contexts.keep(1, 71, features(71, 200))
    assert not contexts.may_draft(1, 100)
    assert contexts.may_draft(1, 128)
    assert contexts.may_draft(1, 200)
    assert contexts.waiting.num_tokens == 64 + 72
    known = [*range(64), *range(128, 200)]
    assert contexts.positions(1, 200) == known
    config = MODEL.config
    shape = (1, config.num_key_value_heads, len(known), config.head_dim)
    numbers = torch.tensor(known)[None, None, :, None].expand(shape).float()
    needed = contexts.needed(ContextSpan(1, 0, 200))
    contexts.write(needed, [(numbers, -numbers)] * config.num_hidden_layers)
    view = contexts.view([1], [200])
    assert view.num_context == len(known)
    block = torch.full((1, config.num_key_value_heads, 2, config.head_dim), 900.0)
    keys, values = view.extend(0, block, block)
    assert torch.equal(keys, torch.cat((numbers, block), dim=2))
    assert torch.equal(values, torch.cat((-numbers, block), dim=2))


def test_nobody_drafts_behind_nothing() -> None:
    contexts = open_contexts(8, PAGE_SIZE + 1)
    contexts.give_up(1, 0, 1)
    assert not contexts.may_draft(1, PAGE_SIZE)
    contexts.keep(1, PAGE_SIZE, features(PAGE_SIZE, PAGE_SIZE + 1))
    assert contexts.may_draft(1, PAGE_SIZE + 1)


def test_what_may_wait_is_planned_with_the_pages() -> None:
    contexts = open_contexts(129, PAGE_SIZE)
    assert contexts.waiting.limit == 128 * PAGE_SIZE * WAITING_SHARE
    config = MODEL.config
    key_bytes = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers * 4
    feature_bytes = config.num_features * config.target_hidden_size * 4
    expected = PAGE_SIZE * (key_bytes + WAITING_SHARE * feature_bytes)
    assert PagedContexts.page_bytes(config, torch.float32) == expected


def test_what_waits_owns_its_memory_when_its_page_is_full() -> None:
    contexts = open_contexts(8, 200)
    keep_and_write(contexts, 10)
    for position in range(10, PAGE_SIZE):
        # One row of a step of many.
        step = features(position, position + 100).clone()
        contexts.keep(1, position, step[:1])
        (waiting,) = contexts.needed(ContextSpan(1, 10, position + 1))
        assert waiting.parts[-1].untyped_storage().nbytes() <= PAGE_SIZE * step[0].nbytes
    (part,) = waiting.parts
    assert torch.equal(part, features(10, PAGE_SIZE))
    assert part.untyped_storage().nbytes() == part.nbytes


def test_a_long_backlog_is_projected_in_pieces() -> None:
    waiting = [Waiting(i, 0, size) for i, size in enumerate((64, 64, 384, 1, 600, 64))]
    pieces = [[w.end for w in piece] for piece in _pieces(waiting)]
    assert pieces == [[64, 64, 384], [1], [600], [64]]
    assert list(_pieces([])) == []
