"""Contexts of a drafter whose keys belong to pairs: a token, and the feature of the one before it.

A pair stands at the position of its token. So what a page holds depends on the tokens up to the
page's end and on nothing behind it, as the prefix chain promises, whatever a later sequence goes on
with. The pair of the first token behind a page needs the feature of the page's last token, which is
kept with the page. Position 0 has no token before it: what lies there is nothing, and nobody may
look at it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.models.draft.context import DraftContext, DraftContexts, SeparateContexts
from blockdraft.models.draft.eagle3_config import AnyDraftConfig
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.waiting_features import Waiting


class PairContexts(DraftContexts, Protocol):
    """Contexts that know the tokens of what waits, and the last feature of each sequence."""

    def begin(self, key: int, num_reused: int) -> None:
        """A sequence begins behind tokens that another one committed."""

    def keep_pairs(self, key: int, start: int, token_ids: Sequence[int], features: Tensor) -> None:
        """Let the pairs of the tokens from `start` on wait.

        features: [new, num_features * hidden] of these tokens themselves; each enters the pair of
        the next one.
        """

    def last_feature(self, key: int) -> Tensor:
        """[num_features * hidden] of the last committed token, for the pair of the anchor."""

    def token_ids(self, waiting: Waiting) -> list[int]:
        """Of what waits."""


class SeparatePairs(SeparateContexts):
    """Pairs of each sequence in a context of its own."""

    def __init__(self, new_context: Callable[[], DraftContext]) -> None:
        super().__init__(new_context)
        self._token_ids: dict[int, list[int]] = {}
        self._last: dict[int, Tensor] = {}

    def begin(self, key: int, num_reused: int) -> None:
        """See PairContexts; nothing is ever reused here."""
        assert num_reused == 0
        self._token_ids[key] = []

    def keep_pairs(self, key: int, start: int, token_ids: Sequence[int], features: Tensor) -> None:
        """See PairContexts."""
        self._token_ids[key][start:] = token_ids
        self.keep(key, start, shifted(self._last.get(key), features))
        self._last[key] = features[-1].clone()

    def last_feature(self, key: int) -> Tensor:
        """See PairContexts."""
        return self._last[key]

    def token_ids(self, waiting: Waiting) -> list[int]:
        """See PairContexts."""
        return self._token_ids[waiting.holder][waiting.start : waiting.end]

    def close(self, key: int) -> None:
        """See `DraftContexts.close`."""
        super().close(key)
        self._token_ids.pop(key, None)
        self._last.pop(key, None)


class PagedPairs(PagedContexts):
    """Pairs in the target's pages, each with the feature of its last token."""

    def __init__(self, config: AnyDraftConfig, pages: Pages, weight: Tensor) -> None:
        super().__init__(config, pages, weight)
        size = config.num_features * config.target_hidden_size
        # Written before they are read, and so taken from the system page by page.
        self._ends = weight.new_empty(pages.num_pages, size)
        self._token_ids = torch.empty(pages.num_tokens + PAGE_SIZE, dtype=torch.int64)
        self._last: dict[int, Tensor] = {}

    @staticmethod
    def page_bytes(config: AnyDraftConfig, dtype: torch.dtype) -> float:
        """See PagedContexts.page_bytes; and the tokens and the last feature of a page."""
        feature = config.num_features * config.target_hidden_size * dtype.itemsize
        tokens = PAGE_SIZE * torch.int64.itemsize
        return PagedContexts.page_bytes(config, dtype) + feature + tokens

    def begin(self, key: int, num_reused: int) -> None:
        """See PairContexts; whole pages are reused."""
        self._last.pop(key, None)
        if num_reused:
            assert num_reused % PAGE_SIZE == 0
            page_id = self.pages.page_ids(key)[num_reused // PAGE_SIZE - 1]
            self._last[key] = self._ends[page_id].clone()

    def keep_pairs(self, key: int, start: int, token_ids: Sequence[int], features: Tensor) -> None:
        """See PairContexts."""
        end = start + len(token_ids)
        self._token_ids[self.pages.slots(key, start, end)] = torch.tensor(list(token_ids))
        self.keep(key, start, shifted(self._last.get(key), features))
        self._last[key] = features[-1].clone()
        page_ids = self.pages.page_ids(key)
        for index in range(start // PAGE_SIZE, end // PAGE_SIZE):
            self._ends[page_ids[index]] = features[(index + 1) * PAGE_SIZE - 1 - start]

    def last_feature(self, key: int) -> Tensor:
        """See PairContexts."""
        return self._last[key]

    def token_ids(self, waiting: Waiting) -> list[int]:
        """See PairContexts."""
        first = waiting.holder * PAGE_SIZE + waiting.start % PAGE_SIZE
        found: list[int] = self._token_ids[first : first + len(waiting)].tolist()
        return found

    def close(self, key: int) -> None:
        """See `DraftContexts.close`."""
        super().close(key)
        self._last.pop(key, None)


def shifted(before: Tensor | None, features: Tensor) -> Tensor:
    """[new, F] of tokens -> of the tokens before them; nothing stands before the first of all."""
    first = torch.zeros_like(features[:1]) if before is None else before[None]
    return torch.cat((first, features[:-1]))
