"""Attention of a forward's rows straight over the pages; see `kernels.interface.PagedAttention`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.kernels.cuda.ops import Seen, attention
from blockdraft.kernels.interface import KVPages, Rotation, Scoring, Span, WholeLayer


class RowTables:
    """Where the keys of each row lie, sent to the device once a forward; see PagedRows.

    Raises:
        RuntimeError: in `seeing`, if the ranges are not those of the spans' rows.
    """

    def __init__(self, spans: Sequence[Span], slots: Tensor) -> None:
        self.slots = slots
        rows: list[int] = []
        page_ids: list[int] = []
        path_slots: list[int] = []
        self.has_paths = any(span.path_slots for span in spans)
        for span in spans:
            rows += [len(page_ids), span.path_start, len(path_slots)] * span.num_rows
            page_ids += span.seen_page_ids
            path_slots += span.path_slots
        self.num_seeing = len(rows) // 3
        # Rows behind the spans see nothing, so their table is never read.
        rows += [0] * (3 * (slots.shape[0] - self.num_seeing))
        sizes = [len(rows), len(page_ids), len(path_slots)]
        tables = torch.tensor([*rows, *page_ids, *path_slots], device=slots.device)
        self.rows, self.page_ids, self.path_slots = torch.split(tables, sizes)

    def seeing(self, ranges: Tensor) -> "OverPages":
        """See PagedRows.seeing."""
        if ranges.shape != (self.num_seeing, 2):
            raise RuntimeError(f"{tuple(ranges.shape)} ranges for {self.num_seeing} rows")
        filled = ranges.new_zeros((self.slots.shape[0], 2))
        filled[: self.num_seeing] = ranges
        path_slots = self.path_slots if self.has_paths else None
        return OverPages(self.slots, Seen(filled, self.rows, self.page_ids, path_slots))


class OverPages:
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

    def run_layer(
        self,
        whole: WholeLayer,
        kv: KVPages,
        layer: int,
        hidden: Tensor,
        rotation: Rotation,
        scoring: Scoring,
    ) -> None:
        """None: there is no whole layer."""
