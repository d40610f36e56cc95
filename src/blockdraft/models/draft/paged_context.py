"""The draft context of many sequences in pages, one page table for target and drafter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import LayerShape, PagedKV, page_bytes
from blockdraft.cache.pages import PAGE_SIZE, SCRATCH_PAGE, Pages
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Rotation, Span
from blockdraft.kernels.tables import even_tables
from blockdraft.kernels.weights import Norm
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.draft.context import ContextSpan, LayerKV
from blockdraft.models.draft.eagle3_config import AnyDraftConfig
from blockdraft.models.draft.waiting_features import Waiting, WaitingFeatures

WAITING_SHARE = 1 / 16
"""Of the tokens that fit, so many may have features that wait: a few percent more memory."""


class PagedContexts:
    """Draft keys and values that mirror the target's pages, for all sequences at once.

    A page taken over from the prefix chain holds them already, or its features wait; whoever drafts
    first writes them, for all who hold it. Where many sequences run and hardly any drafts, to keep
    and project features takes a few percent of the time. So pages may be given up, and drafts do
    without their tokens: those of tokens that are not needed, and, where too many features wait,
    pages that no sequence holds and that none has taken over.
    """

    together = True

    def __init__(self, config: AnyDraftConfig, pages: Pages, weight: Tensor) -> None:
        self.pages = pages
        self.kv = PagedKV(
            self.shapes(config), pages.num_pages, dtype=weight.dtype, device=weight.device
        )
        self._device = weight.device
        self.backend = backend_for(weight.dtype, weight.device, [config.head_dim])
        num_waiting = int(pages.num_tokens * WAITING_SHARE)
        self.waiting = WaitingFeatures(max(PAGE_SIZE, num_waiting))
        self._given_up: set[int] = set()
        """Pages without a context, until they hold other tokens."""
        assert pages.on_forget is None, "these pages have draft contexts already"
        pages.on_forget = self._forget

    @staticmethod
    def shapes(config: AnyDraftConfig) -> list[LayerShape]:
        """kv_heads and head_dim of each layer."""
        return [(config.num_key_value_heads, config.head_dim)] * config.num_hidden_layers

    @staticmethod
    def page_bytes(config: AnyDraftConfig, dtype: torch.dtype) -> float:
        """Memory for each page: its keys and values, and its share of the features that wait."""
        features = PAGE_SIZE * config.num_features * config.target_hidden_size * dtype.itemsize
        return page_bytes(PagedContexts.shapes(config), dtype) + WAITING_SHARE * features

    def parts(self, key: int, start: int, features: Tensor) -> list[Waiting]:
        """See `DraftContexts.parts`: page by page."""
        page_ids, end = self.pages.page_ids(key), start + features.shape[0]
        parts, begin = list[Waiting](), start
        while begin < end:
            index = begin // PAGE_SIZE
            stop = min(end, (index + 1) * PAGE_SIZE)
            own = features[begin - start : stop - start]
            parts.append(Waiting(page_ids[index], begin, stop, [own]))
            begin = stop
        return parts

    def keep(self, key: int, start: int, features: Tensor, *, is_needed: bool = True) -> None:
        """See `DraftContexts.keep`."""
        if not is_needed:
            self.give_up(key, start, start + features.shape[0])
            return
        index, place = divmod(start, PAGE_SIZE)
        if place + features.shape[0] <= PAGE_SIZE:  # most are of one token
            self._keep(self.pages.page_ids(key)[index], start, features)
            return
        for part in self.parts(key, start, features):
            self._keep(part.holder, part.start, part.parts[0])

    def _keep(self, page_id: int, start: int, features: Tensor) -> None:
        if page_id not in self._given_up:
            self.waiting.keep(page_id, start, features)

    def give_up(self, key: int, start: int, end: int) -> None:
        """Do without these tokens, and without all that share a page with them."""
        for index in range(start // PAGE_SIZE, -(-end // PAGE_SIZE)):
            self._give_up(self.pages.page_ids(key)[index])

    def _give_up(self, page_id: int) -> None:
        if page_id not in self._given_up:
            self.waiting.drop(page_id)
            self._given_up.add(page_id)

    def may_draft(self, key: int, length: int) -> bool:
        """See `DraftContexts.may_draft`. A block begins in the page of the last tokens."""
        index, place = divmod(length, PAGE_SIZE)
        if place and self.pages.page_ids(key)[index] in self._given_up:
            return False
        return self._table(key, length)[1] > 0

    def needed(self, span: ContextSpan) -> list[Waiting]:
        """See `DraftContexts.needed`."""
        first, last = span.start // PAGE_SIZE, -(-span.end // PAGE_SIZE)
        return self.waiting.of(self.pages.page_ids(span.key)[first:last])

    def excess(self) -> list[Waiting]:
        """See `DraftContexts.excess`."""
        needed = []
        for waiting in self.waiting.excess():
            if waiting.is_shared or self.pages.is_held(waiting.holder):
                needed.append(waiting)
            else:
                self._give_up(waiting.holder)
        return needed

    def reused(self, key: int, num_tokens: int) -> None:
        """See `DraftContexts.reused`."""
        for waiting in self.needed(ContextSpan(key, 0, num_tokens)):
            waiting.is_shared = True

    def positions(self, key: int, length: int) -> Sequence[int]:
        """See `DraftContexts.positions`."""
        page_ids, num_tokens = self._table(key, length)
        if num_tokens == length:
            return range(length)
        known = set(page_ids)
        of_page = self.pages.page_ids(key)
        return [p for p in range(length) if of_page[p // PAGE_SIZE] in known]

    def _table(self, key: int, length: int) -> tuple[Sequence[int], int]:
        """Of the first `length` tokens the pages with a context, and how many tokens they hold."""
        page_ids = self.pages.page_ids(key)[: -(-length // PAGE_SIZE)]
        if self._given_up.isdisjoint(page_ids):
            return page_ids, length
        known = [page_id for page_id in page_ids if page_id not in self._given_up]
        return known, length - PAGE_SIZE * (len(page_ids) - len(known))

    def _forget(self, page_id: int) -> None:
        self.waiting.drop(page_id)
        self._given_up.discard(page_id)

    def write(self, needed: Sequence[Waiting], context_kv: Sequence[LayerKV]) -> None:
        """See `DraftContexts.write`."""
        slots = self._slots(needed)
        for layer, (k, v) in enumerate(context_kv):
            self.kv.write(layer, slots, k[0], v[0])
        self._drop(needed)

    def write_projected(
        self, needed: Sequence[Waiting], projected: Tensor, key_norms: Norm, rotation: Rotation
    ) -> None:
        """The same from one product of all layers; see `Backend.store_context`."""
        slots = self._slots(needed)
        self.backend.store_context(self.kv, slots, projected, key_norms, rotation)
        self._drop(needed)

    def _slots(self, needed: Sequence[Waiting]) -> Tensor:
        """Where what is needed is about to be written."""
        slots = [
            waiting.holder * PAGE_SIZE + position % PAGE_SIZE
            for waiting in needed
            for position in range(waiting.start, waiting.end)
        ]
        self.kv.clear_begun(slots)
        return torch.tensor(slots, device=self._device)

    def _drop(self, needed: Sequence[Waiting]) -> None:
        for waiting in needed:
            self.waiting.drop(waiting.holder)

    def view(self, keys: Sequence[int], lengths: Sequence[int]) -> "PagedContextView":
        """The first `lengths` tokens of each sequence, for one draft forward."""
        own = [self._table(key, length) for key, length in zip(keys, lengths, strict=True)]
        tables = even_tables([page_ids for page_ids, _ in own])
        page_ids = torch.tensor(tables, device=self._device).flatten()
        return PagedContextView(self.kv, page_ids, [num_tokens for _, num_tokens in own])

    def blocks(
        self, keys: Sequence[int], lengths: Sequence[int], sizes: Sequence[int]
    ) -> tuple[list[Span], list[int]]:
        """What a block of each sequence, behind its first `lengths` tokens, attends to.

        A block has `sizes` slots that count, and is filled up to the longest. Its keys and values
        are written behind the context, where there is room: the target will write its own to these
        positions. What a block leaves there is overwritten when its tokens are committed, and seen
        by nobody else until then. Slots that only fill up go to the scratch page, and are not seen.

        Returns:
            of each block its rows, and of each row where its keys and values go.
        """
        width = max(sizes)
        slots: list[int] = []
        spans: list[Span] = []
        for index, (key, length, size) in enumerate(zip(keys, lengths, sizes, strict=True)):
            end = min(length + size, self.pages.room(key))
            page_ids, num_tokens = self._table(key, end)
            num_given_up = end - num_tokens
            start, stop = length - num_given_up, num_tokens
            spans.append(Span(index * width, width, start, stop, page_ids))
            slots += self.pages.slots(key, length, end)
            slots += [SCRATCH_PAGE * PAGE_SIZE] * (width - (end - length))
        return spans, slots

    def plan(self, spans: Sequence[Span], slots: Sequence[int]) -> AttentionPlan:
        """Attention of the rows that `blocks` has found."""
        return AttentionPlan(self.backend, self.kv, spans, torch.tensor(slots, device=self._device))

    def close(self, key: int) -> None:
        """The pages belong to the target's memory, which forgets them."""


class PagedContextView:
    """ContextKV of several sequences, all filled up to the whole pages of the longest.

    Masks must hide what is behind the end of a sequence. A sequence alone is not filled up.
    """

    def __init__(self, kv: PagedKV, page_ids: Tensor, lengths: Sequence[int]) -> None:
        self._kv = kv
        self._page_ids = page_ids
        self._num_sequences = len(lengths)
        whole = page_ids.shape[0] // len(lengths) * PAGE_SIZE
        self._num_context = whole if len(lengths) > 1 else lengths[0]

    @property
    def num_context(self) -> int:
        """Tokens in the context, filled up."""
        return self._num_context

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """See `ContextKV.extend`."""
        keys, values = self._kv.gather(layer, self._page_ids)
        return self._behind(keys, k), self._behind(values, v)

    def _behind(self, context: Tensor, block: Tensor) -> Tensor:
        heads, _, head_dim = context.shape
        by_sequence = context.view(heads, self._num_sequences, -1, head_dim).transpose(0, 1)
        return torch.cat((by_sequence[:, :, : self._num_context], block), dim=2)
