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
    due = contexts.due(ContextSpan(1, 0, num_tokens))
    zeros = torch.zeros(1, MODEL.config.num_key_value_heads, num_tokens, MODEL.config.head_dim)
    contexts.write(due, [(zeros, zeros)] * MODEL.config.num_hidden_layers)


def test_features_wait_in_the_pages_of_their_tokens() -> None:
    contexts = open_contexts(8, 300)
    for start, end in ((0, 10), (10, 64), (64, 70), (70, 250)):
        contexts.keep(1, start, features(start, end))
    due = contexts.due(ContextSpan(1, 0, 250))
    assert [(w.start, w.end) for w in due] == [(0, 64), (64, 128), (128, 192), (192, 250)]
    assert [w.holder for w in due] == list(contexts.pages.page_ids(1))[:4]
    for waiting in due:
        assert torch.equal(torch.cat(waiting.parts), features(waiting.start, waiting.end))
    assert contexts.due(ContextSpan(1, 130, 190)) == [due[2]]
    assert contexts.waiting.num_tokens == 250


def test_what_was_written_waits_no_longer_and_what_comes_behind_it_does() -> None:
    contexts = open_contexts(8, 200)
    keep_and_write(contexts, 100)
    assert contexts.waiting.num_tokens == 0
    contexts.keep(1, 100, features(100, 140))
    due = contexts.due(ContextSpan(1, 100, 140))
    assert [(w.start, w.end) for w in due] == [(100, 128), (128, 140)]


def test_what_nobody_can_reach_does_not_wait() -> None:
    contexts = open_contexts(4, 3 * PAGE_SIZE)
    ids = list(range(3 * PAGE_SIZE))
    contexts.keep(1, 0, features(0, 2 * PAGE_SIZE + 5))
    contexts.pages.publish(1, ids, 2 * PAGE_SIZE)
    contexts.pages.close(1)
    # Two pages stay in the prefix chain, and their features with them.
    assert contexts.waiting.num_tokens == 2 * PAGE_SIZE
    assert contexts.pages.open(2, ids, with_context=True) == 2 * PAGE_SIZE
    assert len(contexts.due(ContextSpan(2, 0, 2 * PAGE_SIZE))) == 2
    contexts.pages.close(2)
    contexts.pages.open(3, [7], with_context=True)
    assert contexts.pages.reserve(3, 3 * PAGE_SIZE)
    assert contexts.waiting.num_tokens == 0


def test_the_oldest_are_due_when_too_many_wait() -> None:
    waiting = WaitingFeatures(limit=10)
    for holder in (5, 3, 9):
        waiting.keep(holder, 0, features(0, 4))
    assert [due.holder for due in waiting.excess()] == [5]
    waiting.drop(5)
    assert waiting.excess() == []
    waiting.keep(3, 4, features(4, 11))
    assert [due.holder for due in waiting.excess()] == [3]


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
        (waiting,) = contexts.due(ContextSpan(1, 10, position + 1))
        assert waiting.parts[-1].untyped_storage().nbytes() <= PAGE_SIZE * step[0].nbytes
    (part,) = waiting.parts
    assert torch.equal(part, features(10, PAGE_SIZE))
    assert part.untyped_storage().nbytes() == part.nbytes


def test_a_long_backlog_is_projected_in_pieces() -> None:
    waiting = [Waiting(i, 0, size) for i, size in enumerate((64, 64, 384, 1, 600, 64))]
    pieces = [[w.end for w in piece] for piece in _pieces(waiting)]
    assert pieces == [[64, 64, 384], [1], [600], [64]]
    assert list(_pieces([])) == []
