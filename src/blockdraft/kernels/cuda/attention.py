"""Attention of a forward's rows straight over the pages; see `kernels.interface.PagedAttention`."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from blockdraft.kernels.cuda.ops import Seen, attention
from blockdraft.kernels.interface import KVPages, PagedAttention, PagedTables, Scoring, Span
from blockdraft.kernels.tables import TableEntries


class RowTables:
    """Rows that find their keys in tables on the device; see PagedRows.

    num_seeing: rows that belong to a span, the first ones.
    """

    def __init__(self, slots: Tensor, tables: PagedTables, num_seeing: int) -> None:
        self._slots, self._tables, self._num_seeing = slots, tables, num_seeing

    @classmethod
    def of(cls, spans: Sequence[Span], slots: Tensor) -> Self:
        """The tables of these spans, sent to the device at once."""
        entries = TableEntries.of(spans)
        num_seeing = len(entries.rows) // 3
        # Rows behind the spans see nothing, so their tables are never read.
        entries.rows += [0] * (3 * (slots.shape[0] - num_seeing))
        entries.path_slots.append(0)  # no table is empty
        parts = entries.rows, entries.page_ids, entries.path_slots
        numbers = torch.tensor([*parts[0], *parts[1], *parts[2]], device=slots.device)
        rows, page_ids, path_slots = torch.split(numbers, [len(part) for part in parts])
        return cls(slots, PagedTables(rows, page_ids, path_slots), num_seeing)

    def seeing(self, ranges: Tensor) -> "OverPages":
        """See PagedRows.seeing.

        Raises:
            RuntimeError: the ranges are not those of the spans' rows.
        """
        if ranges.shape != (self._num_seeing, 2):
            raise RuntimeError(f"{tuple(ranges.shape)} ranges for {self._num_seeing} rows")
        filled = ranges.new_zeros((self._slots.shape[0], 2))
        filled[: self._num_seeing] = ranges
        return OverPages(self._slots, Seen(filled, self._tables))


class OverPages(PagedAttention):
    """See PagedAttention."""

    def __init__(self, slots: Tensor, seen: Seen) -> None:
        self._slots, self._seen = slots, seen

    def attend(
        self, kv: KVPages, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See PagedAttention.attend. Rows of no span get zeros."""
        kv.write(layer, self._slots, key, value)
        keys, values = kv.pools[layer].flatten(2, 3).unbind()
        return attention(query, keys, values, self._seen, scoring)
