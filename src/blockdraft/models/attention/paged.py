"""Attention of many sequences packed in one row, over K/V in pages.

A forward runs with a plan: where each row's key and value go, and which rows attend to which pages.
transformers models call the registered function layer by layer, and it follows the plan in force.
With kernels the pages are read in place; without, they are gathered for products over groups.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE, even_tables
from blockdraft.kernels.cpu.layer import DecoderLayer
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import TILE, TiledAttention, kernels_for_heads
from blockdraft.models.attention.exact import grouped_attention, softmax_dtype

PAGED_ATTENTION = "blockdraft_paged"


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of one sequence in a forward: `num_rows` from row `first` on.

    They stand at the positions `start`, `start + 1`, ... of their sequence.
    """

    first: int
    num_rows: int
    start: int
    page_ids: Sequence[int]

    @property
    def num_pages(self) -> int:
        """Pages that the rows look at."""
        return -(-(self.start + self.num_rows) // PAGE_SIZE)


class AttentionPlan(Protocol):
    """What the attention of one forward does."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """Store a layer's keys and values, then attend.

        query: [heads, rows, head_dim]; key, value: [kv_heads, rows, head_dim].
        Returns [rows, heads, head_dim]; rows of no sequence are undefined but finite.
        """


def kernels_for_pages(kv: PagedKV) -> Library | None:
    """The kernels, if they attend over every layer of these pages."""
    assert TILE == PAGE_SIZE
    found = [kernels_for_heads(pool) for pool in kv.pools]
    return found[0] if all(found) else None


class TiledPlan:
    """Attention straight over the pages, row by row."""

    def __init__(self, kernels: Library, kv: PagedKV, spans: Sequence[Span], slots: Tensor) -> None:
        self._kernels = kernels
        self._kv = kv
        self._spans = spans
        self._slots = slots
        self._pages = torch.tensor(
            [p for s in spans for p in s.page_ids[: s.num_pages]], device="cpu"
        )
        self._windows: dict[int | None, TiledAttention] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """See AttentionPlan.attend."""
        keys, values = self._kv.pools[layer].unbind()
        return self._over(window).attend(
            self._kernels, query, keys, values, scale, softcap, s_aux, (key, value)
        )

    def run_layer(
        self,
        layer: DecoderLayer,
        index: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        scale: float,
        window: int | None,
    ) -> Tensor:
        """A whole layer, the `index`-th of the model; see DecoderLayer."""
        keys, values = self._kv.pools[index].unbind()
        return layer(hidden, rotation, self._over(window), keys, values, scale)

    def _over(self, window: int | None) -> TiledAttention:
        if window not in self._windows:
            spans, place = [], 0
            for span in self._spans:
                spans.append((span.first, span.num_rows, place))
                place += span.num_pages
            self._windows[window] = TiledAttention(
                self._slots.shape[0],
                spans,
                max(span.start + span.num_rows for span in self._spans),
                pages=self._pages,
                ranges=self._ranges(window),
                slots=self._slots,
            )
        return self._windows[window]

    def _ranges(self, window: int | None) -> Tensor:
        """[rows, 2]: the keys up to a row's own, those of a sliding window if given."""
        positions = [
            position
            for span in self._spans
            for position in range(span.start, span.start + span.num_rows)
        ]
        ends = torch.tensor(positions, device="cpu") + 1
        firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp_(min=0)
        return torch.stack((firsts, ends), dim=1)


class Group:
    """Sequences whose rows attend in one product: b of them, q rows each, over as many pages.

    Shorter spans are filled up: rows by repeating the last one, pages as in `even_tables`.
    """

    def __init__(self, spans: Sequence[Span], row_multiple: int, device: torch.device) -> None:
        num_rows = max(span.num_rows for span in spans)
        num_rows += -num_rows % row_multiple
        last = [[min(i, span.num_rows - 1) for i in range(num_rows)] for span in spans]
        rows = [[span.first + i for i in own] for span, own in zip(spans, last, strict=True)]
        self.rows = torch.tensor(rows, device=device)
        self.positions = torch.tensor(
            [[span.start + i for i in own] for span, own in zip(spans, last, strict=True)],
            device=device,
        )
        tables = even_tables([span.page_ids[: span.num_pages] for span in spans])
        self.page_ids = torch.tensor(tables, device=device).flatten()
        self._biases: dict[int | None, Tensor] = {}

    def bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, [b, q, keys]: causal, and of a sliding window if given."""
        if window not in self._biases:
            num_keys = self.page_ids.shape[0] // self.rows.shape[0] * PAGE_SIZE
            keys = torch.arange(num_keys, device=self.rows.device)
            behind = self.positions[:, :, None] - keys
            hidden = behind < 0
            if window is not None:
                hidden |= behind >= window
            bias = torch.zeros(hidden.shape, dtype=softmax_dtype(dtype), device=keys.device)
            self._biases[window] = bias.masked_fill_(hidden, -torch.inf)
        return self._biases[window]


@dataclass(slots=True)
class GroupedPlan:
    """Write to `slots` [rows], then attend group by group.

    With `is_whole` the one group holds the forward's rows as they come.
    """

    kv: PagedKV
    slots: Tensor
    groups: list[Group]
    is_whole: bool = field(default=False)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> Tensor:
        """See AttentionPlan.attend."""
        self.kv.write(layer, self.slots, key, value)
        query = query.view(key.shape[0], -1, *query.shape[1:])
        output = None
        for group in self.groups:
            keys, values = self.kv.gather(layer, group.page_ids)
            own = query[:, None] if self.is_whole else _take_rows(query, group.rows)
            found = grouped_attention(
                own,
                keys.view(keys.shape[0] * group.rows.shape[0], -1, keys.shape[2]),
                values.view(keys.shape[0] * group.rows.shape[0], -1, keys.shape[2]),
                group.bias(window, query.dtype),
                scale,
                softcap,
                s_aux,
            )
            # [kv_heads, b, group, q, head_dim] -> [b, q, heads, head_dim]
            found = found.permute(1, 3, 0, 2, 4).flatten(2, 3)
            if self.is_whole:
                return found[0]
            if output is None:
                output = found.new_zeros((query.shape[2], *found.shape[2:]))
            output[group.rows.flatten()] = found.flatten(0, 1)
        assert output is not None
        return output


def plan_attention(
    kv: PagedKV,
    spans: Sequence[Span],
    slots: Tensor,
    row_multiple: int,
    kernels: Library | None = None,
) -> AttentionPlan:
    """A plan for the spans of a forward, which follow each other from row 0 on."""
    if kernels is not None:
        return TiledPlan(kernels, kv, spans, slots)
    return plan_groups(kv, spans, slots, row_multiple)


def plan_groups(
    kv: PagedKV, spans: Sequence[Span], slots: Tensor, row_multiple: int
) -> GroupedPlan:
    """Group the spans of a forward by about as many rows and about as many pages."""
    if len(spans) == 1 and slots.shape[0] == spans[0].num_rows + -spans[0].num_rows % row_multiple:
        return GroupedPlan(kv, slots, [Group(spans, row_multiple, slots.device)], is_whole=True)
    by_size: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        # Powers of two: no row is filled up to more than twice its size, no table either.
        size = ((span.num_rows - 1).bit_length(), (span.num_pages - 1).bit_length())
        by_size.setdefault(size, []).append(span)
    groups = [Group(own, row_multiple, slots.device) for own in by_size.values()]
    return GroupedPlan(kv, slots, groups)


def _take_rows(query: Tensor, rows: Tensor) -> Tensor:
    """[kv_heads, group, rows, head_dim] at rows [b, q] -> [kv_heads, b, group, q, head_dim]."""
    taken = query.index_select(2, rows.flatten())
    return taken.view(*query.shape[:2], *rows.shape, -1).transpose(1, 2)


class _InForce(threading.local):
    plan: AttentionPlan | None = None


_in_force = _InForce()


@contextmanager
def follow(plan: AttentionPlan) -> Iterator[None]:
    """Let forwards of this thread follow a plan."""
    _in_force.plan = plan
    try:
        yield
    finally:
        _in_force.plan = None


def tiled_plan_in_force() -> TiledPlan | None:
    """The plan of this thread's forward, if kernels follow it."""
    plan = _in_force.plan
    return plan if isinstance(plan, TiledPlan) else None


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """For transformers' attention interface; heads as in `exact_attention`, all rows packed."""
    plan = _in_force.plan
    assert plan is not None, "no plan is in force"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return (
        plan.attend(layer, query[0], key[0], value[0], scale, sliding_window, softcap, s_aux)[None],
        None,
    )


# No mask function is registered under this name, so transformers makes no mask.
AttentionInterface.register(PAGED_ATTENTION, paged_attention)
