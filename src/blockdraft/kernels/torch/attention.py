"""Attention by batched products, in which a row does not depend on the rows beside it.

`scaled_dot_product_attention` picks kernels and splits by the number of queries, so a row's bits
change with its company. Here it is a batched matrix product, a float32 softmax over a padded number
of keys, and a second product, keys in tiles of fixed borders.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from blockdraft.core.grouping import grouped
from blockdraft.kernels.interface import TILE, KVPages, PagedAttention, Scoring, Span
from blockdraft.kernels.tables import even_tables
from blockdraft.kernels.torch.rules import row_rule
from blockdraft.kernels.torch.vectors import in_whole_vectors

SCORES_BYTES = 2**28
"""Of the scores that a CPU holds at once: those of a long prompt would take tens of GiB."""
_LEAST_ROWS = 32
"""Rows of a sequence that are never parted; a multiple of every rule's `row_multiple`."""


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
) -> Tensor:
    """Row-invariant attention of b sequences, query heads grouped by the K/V head they share.

    query: [kv_heads, b, group, q, head_dim]; key, value: [kv_heads * b, keys, head_dim];
    bias: added to the scores, [b, q, keys], or None; sinks are [kv_heads * group].
    Returns [kv_heads, b, group, q, head_dim].

    No row depends on those beside it, so rows go in parts where their scores would not fit.
    """
    num_rows = _rows_at_once(query, key.shape[1])
    if query.shape[3] <= num_rows:
        return _attention(query, key, value, bias, scoring)
    parts = []
    for start in range(0, query.shape[3], num_rows):
        own = slice(start, start + num_rows)
        own_bias = None if bias is None else bias[:, own]
        parts.append(_attention(query[:, :, :, own], key, value, own_bias, scoring))
    return torch.cat(parts, dim=3)


def _rows_at_once(query: Tensor, num_keys: int) -> int:
    """Rows of each sequence whose scores may be held together."""
    kv_heads, num_sequences, group, q_len, _ = query.shape
    if query.device.type != "cpu":
        return q_len
    of_row = kv_heads * num_sequences * group * num_keys * softmax_dtype(query.dtype).itemsize
    return max(1, SCORES_BYTES // (of_row * _LEAST_ROWS)) * _LEAST_ROWS


def _attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
) -> Tensor:
    """See `grouped_attention`: all rows at once."""
    kv_heads, num_sequences, group, q_len, head_dim = query.shape
    # All query heads of a K/V head are rows of one product: no copy of K/V per head.
    rows = query.reshape(kv_heads * num_sequences, group * q_len, head_dim)
    is_exact = math.frexp(scoring.scale)[0] == 0.5
    if is_exact:  # a power of two rounds nothing, so the smaller tensor may be scaled
        rows = rows * scoring.scale
    scores = _scores(rows, key).to(softmax_dtype(query.dtype))
    if not is_exact:
        scores *= scoring.scale
    if (softcap := scoring.softcap) is not None:
        scores = in_whole_vectors(torch.tanh, scores.div_(softcap)).mul_(softcap)
    scores = scores.view(kv_heads, num_sequences, group, q_len, -1)
    if bias is not None:
        scores += bias[:, None]
    weights = _softmax(scores, scoring.sinks).to(value.dtype)
    weights = weights.view(kv_heads * num_sequences, group * q_len, -1)
    output = _weighted_sum(weights, value)
    # A hidden key or value that is no number leaves its mark on every row: 0 times it is none.
    if bias is not None and not output.sum().isfinite():
        hidden = (bias == -torch.inf)[:, None].expand(scores.shape)
        weights = _softmax(scores.masked_fill_(hidden, -torch.inf), scoring.sinks).to(value.dtype)
        output = _sum_of_seen(weights.view(output.shape[0], output.shape[1], -1), value, hidden)
    return output.view(*query.shape[:-1], -1)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """[kv_heads, rows, head_dim] times [kv_heads, keys, head_dim], keys in fixed tiles."""
    tile, num_keys = row_rule(key.dtype).key_tile, key.shape[1]
    if num_keys <= tile:
        return torch.bmm(query, key.transpose(1, 2))
    scores = query.new_empty(*query.shape[:2], num_keys)
    for start in range(0, num_keys, tile):
        end = start + tile
        scores[:, :, start:end] = torch.bmm(query, key[:, start:end].transpose(1, 2))
    return scores


def _weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """[kv_heads, rows, keys] times [kv_heads, keys, head_dim], keys in tiles of fixed borders."""
    tile, num_keys = row_rule(value.dtype).key_tile, value.shape[1]
    if num_keys <= tile:
        return torch.bmm(weights, value)
    # The sum over tiles rounds once, not per tile.
    output = torch.bmm(weights[:, :, :tile], value[:, :tile]).to(softmax_dtype(value.dtype))
    for start in range(tile, num_keys, tile):
        end = start + tile
        output += torch.bmm(weights[:, :, start:end], value[:, start:end])
    return output.to(value.dtype)


def _sum_of_seen(weights: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
    """`_weighted_sum` in which a value that is no number counts only for rows that see it.

    For the other rows it has the bits of `_weighted_sum` with any number in that place.
    hidden: [kv_heads, b, group, q, keys].
    """
    broken = ~value.isfinite()
    output = _weighted_sum(weights, value.masked_fill(broken, 0.0))
    seen = torch.bmm(hidden.logical_not().reshape(weights.shape).float(), broken.float())
    return output.masked_fill_(seen > 0, torch.nan)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys of [kv_heads, b, group, q, keys].

    A sink takes its share of the sum and is dropped.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sink = sinks.to(scores.dtype).view(scores.shape[0], 1, scores.shape[2], 1, 1)
    sink = sink.expand(*scores.shape[:4], 1)
    return torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1].contiguous()


def softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of scores and weights before they are rounded."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class GroupedRows:
    """Spans that attend in products over groups of them; see PagedRows.

    Where there is only one span and its rows are filled up as the forward is, the one group holds
    the forward's rows as they come.
    """

    def __init__(self, spans: Sequence[Span], slots: Tensor, row_multiple: int) -> None:
        self.slots = slots
        filled = spans[0].num_rows + -spans[0].num_rows % row_multiple
        self.is_whole = len(spans) == 1 and slots.shape[0] == filled
        self.groups = [Group(own, row_multiple, slots.device) for own in _alike(spans)]

    def seeing(self, ranges: Tensor) -> "GroupedAttention":
        """See PagedRows.seeing."""
        return GroupedAttention(self, ranges)


class GroupedAttention(PagedAttention):
    """Attention group by group, over copies of their pages; see PagedAttention."""

    def __init__(self, rows: GroupedRows, ranges: Tensor) -> None:
        self._rows = rows
        self._ranges = ranges
        self._biases: list[Tensor] = []

    def attend(
        self, kv: KVPages, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See PagedAttention.attend."""
        rows = self._rows
        kv.write(layer, rows.slots, key, value)
        if not self._biases:
            self._biases = [group.bias(self._ranges, query.dtype) for group in rows.groups]
        query = query.view(key.shape[0], -1, *query.shape[1:])
        output = None
        for group, bias in zip(rows.groups, self._biases, strict=True):
            keys, values = kv.gather(layer, group.page_ids, group.moves)
            own = query[:, None] if rows.is_whole else _take_rows(query, group.rows)
            found = grouped_attention(
                own,
                keys.view(keys.shape[0] * group.rows.shape[0], -1, keys.shape[2]),
                values.view(keys.shape[0] * group.rows.shape[0], -1, keys.shape[2]),
                bias,
                scoring,
            )
            # [kv_heads, b, group, q, head_dim] -> [b, q, heads, head_dim]
            found = found.permute(1, 3, 0, 2, 4).flatten(2, 3)
            if rows.is_whole:
                return found[0]
            if output is None:
                output = found.new_zeros((query.shape[2], *found.shape[2:]))
            output[group.rows.flatten()] = found.flatten(0, 1)
        assert output is not None
        return output


class Group:
    """Sequences whose rows attend in one product: b of them, q rows each, over as many pages.

    Shorter spans are filled up: rows by repeating the last one, pages by repeating the first. What
    is filled up is masked, but takes part in the products, so no other sequence may share it.
    """

    def __init__(self, spans: Sequence[Span], row_multiple: int, device: torch.device) -> None:
        num_rows = max(span.num_rows for span in spans)
        num_rows += -num_rows % row_multiple
        rows = [[span.first + min(i, span.num_rows - 1) for i in range(num_rows)] for span in spans]
        self.rows = torch.tensor(rows, device=device)
        tables = even_tables([span.seen_page_ids for span in spans])
        self.page_ids = torch.tensor(tables, device=device).flatten()
        # Keys of a path that lie elsewhere: their slots, and their places among the pages.
        self.moves: tuple[Tensor, Tensor] | None = None
        if slots := [slot for span in spans for slot in span.path_slots]:
            places = [
                index * len(tables[0]) * TILE + position
                for index, span in enumerate(spans)
                for position in range(span.path_start, span.end)
            ]
            self.moves = torch.tensor(slots, device=device), torch.tensor(places, device=device)

    def bias(self, ranges: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, [b, q, keys]; ranges: of all rows of the forward."""
        num_keys = self.page_ids.shape[0] // self.rows.shape[0] * TILE
        keys = torch.arange(num_keys, device=self.rows.device)
        firsts, ends = ranges[self.rows][..., None].unbind(2)
        hidden = (keys < firsts) | (keys >= ends)
        bias = torch.zeros(hidden.shape, dtype=softmax_dtype(dtype), device=keys.device)
        return bias.masked_fill_(hidden, -torch.inf)


def _alike(spans: Sequence[Span]) -> Iterable[list[Span]]:
    """Spans of about as many rows and about as many pages."""
    # Powers of two: no row is filled up to more than twice its size, no table either.
    by_size = grouped(
        spans,
        lambda span: (
            (span.num_rows - 1).bit_length(),
            (len(span.seen_page_ids) - 1).bit_length(),
        ),
    )
    return by_size.values()


def _take_rows(query: Tensor, rows: Tensor) -> Tensor:
    """[kv_heads, group, rows, head_dim] at rows [b, q] -> [kv_heads, b, group, q, head_dim]."""
    taken = query.index_select(2, rows.flatten())
    return taken.view(*query.shape[:2], *rows.shape, -1).transpose(1, 2)
