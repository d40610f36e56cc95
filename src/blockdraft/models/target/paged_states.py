"""The states of recurrent layers of many sequences, beside keys and values in pages.

A state after some tokens stands for all of them, so a sequence that takes over pages of another
one needs the state behind the last of them. It is copied where a page ends, and kept as long as
there is room.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.cache.state_layer import LayerState
from blockdraft.cache.states import PackedStates, StateCache
from blockdraft.core.plan import PlannedRow
from blockdraft.models.layers.recurrent import cache_argument, new_cache

_NEVER = 2**62


class BorderStates:
    """States behind full pages, by the digest of the page; the longest unused goes first.

    Of `max_bytes` at most; see `blockdraft.cache.pages.Borders`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: OrderedDict[bytes, tuple[list[LayerState], int]] = OrderedDict()
        self._opened: dict[int, tuple[list[LayerState], int]] = {}
        """States and tokens that an opened sequence goes on behind, until it runs."""

    def __len__(self) -> int:
        return len(self._kept)

    def has(self, digest: bytes) -> bool:
        """See Borders.has."""
        return digest in self._kept

    def opened(self, key: int, digest: bytes | None, num_tokens: int) -> None:
        """See Borders.opened."""
        self._opened.pop(key, None)
        if digest is not None:
            self._kept.move_to_end(digest)
            self._opened[key] = self._kept[digest][0], num_tokens

    def taken(self, key: int) -> tuple[list[LayerState], int] | None:
        """What an opened sequence goes on behind, once; None: from its first token."""
        return self._opened.pop(key, None)

    def put(self, digest: bytes, states: list[LayerState], num_bytes: int) -> None:
        """Keep the states behind a page; those of an equal page are equal."""
        if digest in self._kept or num_bytes > self.max_bytes:
            return
        self._kept[digest] = states, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self.max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.num_bytes -= freed


class PagedStates:
    """The states of all sequences of a paged target whose model has recurrent layers."""

    def __init__(self, model: PreTrainedModel, memory: Pages, max_border_bytes: int) -> None:
        self._model = model
        self._memory = memory
        self._argument = cache_argument(model)
        self._caches: dict[int, StateCache] = {}
        self.borders = BorderStates(max_border_bytes)
        memory.borders = self.borders

    def begin(self, planned: PlannedRow) -> None:
        """Before a forward: its candidates can be taken back, and borders of pages are copied."""
        sequence = planned.row.sequence
        cache = self._of(sequence.key)
        assert cache.length == sequence.num_cached
        end = sequence.num_cached + planned.num_positions
        first = sequence.num_cached // PAGE_SIZE + 1
        borders = range(first * PAGE_SIZE, end + 1, PAGE_SIZE) if self._memory.reuse else ()
        cache.may_return(sequence.num_cached + len(planned.row.new_ids), borders)

    def _of(self, key: int) -> StateCache:
        if key not in self._caches:
            cache = new_cache(self._model)
            assert isinstance(cache, StateCache)
            if (taken := self.borders.taken(key)) is not None:
                cache.resume(*taken)
            else:
                cache.may_return(_NEVER)
            self._caches[key] = cache
        return self._caches[key]

    def arguments(self, spans: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """What the model takes for its cache; spans: keys of sequences, and how many rows each."""
        packed = PackedStates([(self._of(key), num_rows) for key, num_rows in spans])
        return {self._argument: packed, "use_cache": True}

    @torch.inference_mode()
    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """See Target.keep. States where a page ended are kept for others."""
        sequence = planned.row.sequence
        cache = self._caches[sequence.key]
        base = sequence.num_cached + len(planned.row.new_ids)
        kept = base + len(nodes)
        pages = range(sequence.num_cached // PAGE_SIZE, kept // PAGE_SIZE)
        if pages and self._memory.reuse:
            token_ids = sequence.token_ids[:base] + [planned.tree.tokens[node] for node in nodes]
            self._keep_borders(sequence.key, pages, token_ids)
        cache.truncate(kept)

    def _keep_borders(self, key: int, pages: range, token_ids: list[int]) -> None:
        """Keep the states behind pages of a sequence with these tokens."""
        cache = self._caches[key]
        for page in pages:
            digest = self._memory.digest(key, page, token_ids)
            # The states of all layers are copied: not for what an equal text has left there.
            if not self.borders.has(digest):
                states = cache.states_after((page + 1) * PAGE_SIZE)
                self.borders.put(digest, states, cache.num_state_bytes)

    @torch.inference_mode()
    def go_back(self, key: int, length: int) -> None:
        """See Target.truncate."""
        if key in self._caches:
            self._caches[key].truncate(length)

    def close(self, key: int) -> None:
        """Forget a sequence."""
        self._caches.pop(key, None)
        self.borders.opened(key, None, 0)

    def num_bytes(self, key: int) -> int:
        """Of the states of a sequence."""
        return self._of(key).num_state_bytes

    def pretend(self, key: int, length: int, sure: int) -> None:
        """Let the states of a sequence be those after `length` tokens, to go back to `sure`."""
        cache = self._of(key)
        cache.repeat(length)
        cache.may_return(sure)
