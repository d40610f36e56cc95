"""A CPU with compiled kernels; see `kernels.interface.Backend`.

A kernel sums the squares of a norm in another order than torch, and has its own exponential, so the
last bit before a rounding may differ from the reference; every rounding stays where it was. What
the kernels do not know is left to torch's operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, groupby

import torch
from torch import Tensor

from blockdraft.kernels.cpu.layer import NativeHead, NativeLayer, NativeStack
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.onednn import OneDnnBackend
from blockdraft.kernels.cpu.ops import (
    IS_BFLOAT16,
    TiledAttention,
    add_rms_norm,
    attends_over,
    gated_silu,
    largest_scores,
    rms_norm,
    rotate_heads_,
    store_context,
)
from blockdraft.kernels.cpu.products import (
    NativeProduct,
    group_product,
    int8_product,
    packed_product,
)
from blockdraft.kernels.cpu.recurrence import NativeRecurrence, knows
from blockdraft.kernels.interface import (
    HeadParts,
    KVPages,
    Largest,
    LayerParts,
    LayerStack,
    Linear,
    PagedAttention,
    PagedRows,
    Rotation,
    RowRule,
    Scoring,
    Span,
    WholeLayer,
)
from blockdraft.kernels.recurrence_interface import Recurrence, RecurrentStep
from blockdraft.kernels.torch.activations import is_silu
from blockdraft.kernels.weights import AnyWeight, GroupWeight, Int8Weight, Norm


def cpu_backend(dtype: torch.dtype) -> OneDnnBackend:
    """The backend of this machine's CPU in one precision: with kernels if there are any."""
    kernels = library() if dtype in IS_BFLOAT16 else None
    return without_kernels(dtype) if kernels is None else _with_kernels(kernels, dtype)


@lru_cache
def without_kernels(dtype: torch.dtype) -> OneDnnBackend:
    """The same without kernels."""
    return OneDnnBackend(dtype)


@lru_cache
def _with_kernels(kernels: Library, dtype: torch.dtype) -> "NativeBackend":
    return NativeBackend(kernels, dtype)


class NativeBackend(OneDnnBackend):
    """See the module."""

    reads_pages = True

    def __init__(self, kernels: Library, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._kernels = kernels

    @property
    def multiplies_int8(self) -> bool:
        """See Backend.multiplies_int8: where kernels also multiply what is not in int8."""
        step: int = self._kernels.product_step(IS_BFLOAT16[self.dtype])
        return step > 0 and self._kernels.int8_step() > 0

    @property
    def multiplies_groups(self) -> bool:
        """See Backend.multiplies_groups."""
        return bool(self._kernels.group_panel())

    def attends_over(self, head_dim: int) -> bool:
        """See Backend.attends_over."""
        return attends_over(head_dim)

    def gates(self, activation: object) -> bool:
        """See Backend.gates: silu, torch's and transformers' own."""
        return is_silu(activation)

    def linear(self, weight: AnyWeight, bias: Tensor | None = None) -> Linear:
        """See Backend.linear. Products by kernels where they fit, else by oneDNN or torch."""
        product: NativeProduct | None = None
        if isinstance(weight, Int8Weight):
            product = int8_product(self._kernels, weight, bias)
        elif isinstance(weight, GroupWeight):
            product = group_product(self._kernels, weight, bias)
        elif self.packs:
            product = packed_product(self._kernels, weight, bias)
        return product or super().linear(weight, bias)

    @property
    def rule(self) -> RowRule:
        """See Backend.rule. The norm before the head is computed as those of the layers are."""
        return replace(super().rule, replaces_norms=True)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Backend.norm."""
        return rms_norm(self._kernels, x, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See Backend.add_norm."""
        return add_rms_norm(self._kernels, x, residual, norm)

    def rotate_(
        self,
        heads: Tensor,
        num_heads: tuple[int, int, int],
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.rotate_; in place."""
        rotate_heads_(self._kernels, heads, *num_heads[:2], rotation, norms)
        queries, keys, values = heads.split_with_sizes(num_heads, dim=-2)
        return queries, keys, values

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """See Backend.gate."""
        if not self.gates(activation):
            return super().gate(gate_up, activation)
        return gated_silu(self._kernels, gate_up)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """See Backend.attend. The keys are one long page, and the bias says who is seen."""
        num_rows, num_keys = query.shape[1], key.shape[1]
        is_known = attends_over(query.shape[-1]) and key.shape == value.shape
        if not is_known or not _is_plain(bias, num_rows, num_keys):
            return super().attend(query, key, value, bias, scoring)
        plan = TiledAttention(
            num_rows, [(0, num_rows, 0)], num_keys, bias=None if bias is None else bias[0]
        )
        # In whole buffers this copies nothing.
        return plan.attend(self._kernels, query, key.contiguous(), value.contiguous(), scoring)

    def paged_rows(self, spans: Sequence[Span], slots: Tensor, row_multiple: int) -> PagedRows:
        """See Backend.paged_rows. Any number of rows will do."""
        return TiledRows(self._kernels, spans, slots)

    def largest(self, scores: Tensor, num: int) -> Largest:
        """See Backend.largest."""
        if scores.dtype not in IS_BFLOAT16:
            return super().largest(scores, num)
        return largest_scores(self._kernels, scores, num)

    def store_context(
        self, kv: KVPages, slots: Tensor, projected: Tensor, key_norms: Norm, rotation: Rotation
    ) -> None:
        """See Backend.store_context."""
        store_context(self._kernels, kv.pools, slots, projected, key_norms, rotation)

    def recurrent_step(self, rule: Recurrence) -> RecurrentStep | None:
        """See Backend.recurrent_step. Other sizes are left to the model."""
        if not knows(self._kernels, rule):
            return None
        return NativeRecurrence(self._kernels, rule, self.dtype)

    def layer(self, parts: LayerParts) -> WholeLayer | None:
        """See Backend.layer: with silu, heads of a known size and products by kernels."""
        if not self.gates(parts.activation) or not attends_over(parts.head_dim):
            return None
        qkv, o, gate_up, down = parts.qkv, parts.o, parts.gate_up, parts.down
        if not (
            isinstance(qkv, NativeProduct)
            and isinstance(o, NativeProduct)
            and isinstance(gate_up, NativeProduct)
            and isinstance(down, NativeProduct)
        ):
            return None
        norms = parts.norm, parts.mlp_norm
        return NativeLayer(self._kernels, (qkv, o, gate_up, down), norms, parts.head_norms)

    def stack(
        self,
        layers: Sequence[WholeLayer],
        kv: KVPages,
        scorings: Sequence[Scoring],
        kinds: Sequence[int],
        kept: Sequence[int],
        head: HeadParts | None = None,
    ) -> LayerStack | None:
        """See Backend.stack. A whole layer has neither soft cap nor sinks."""
        if not all(_is_simple(scoring) for scoring in scorings):
            return None
        native_head = None
        if head is not None:
            if not isinstance(head.linear, NativeProduct):
                return None
            native_head = NativeHead(head.norm, head.linear)
        native = [layer for layer in layers if isinstance(layer, NativeLayer)]
        pools = kv.pools, kv.scales
        return TiledStack(
            NativeStack(self._kernels, native, *pools, scorings, kinds, kept, native_head)
        )


class TiledRows:
    """Rows that read their pages in place, one by one; see PagedRows."""

    def __init__(self, kernels: Library, spans: Sequence[Span], slots: Tensor) -> None:
        self._kernels = kernels
        self._slots = slots
        page_ids: list[int] = []
        self._spans: list[tuple[int, int, int]] = []
        # Spans of one sequence share a table: the kernels then read the keys of all at once.
        for _, own in groupby(spans, key=lambda span: span.page_ids):
            of_sequence, place = list(own), len(page_ids)
            page_ids += max(of_sequence, key=lambda span: span.end).seen_page_ids
            self._spans += [(span.first, span.num_rows, place) for span in of_sequence]
        self._pages = torch.tensor(page_ids, device="cpu", dtype=torch.int64)
        self._num_keys = max(span.end for span in spans)
        self._paths = _path_tables(spans) if any(span.path_slots for span in spans) else None

    def seeing(self, ranges: Tensor) -> "TiledPages":
        """See PagedRows.seeing."""
        return TiledPages(
            self._kernels,
            TiledAttention(
                self._slots.shape[0],
                self._spans,
                self._num_keys,
                pages=self._pages,
                ranges=ranges,
                slots=self._slots,
                paths=self._paths,
            ),
        )


def _path_tables(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """See TiledAttention: paths."""
    places = accumulate((len(span.path_slots) for span in spans), initial=0)
    starts = [(span.path_start, place) for span, place in zip(spans, places, strict=False)]
    slots = [slot for span in spans for slot in span.path_slots]
    return torch.tensor(starts, device="cpu"), torch.tensor(slots, device="cpu")


class TiledPages:
    """Attention straight over the pages; see PagedAttention."""

    def __init__(self, kernels: Library, attention: TiledAttention) -> None:
        self._kernels = kernels
        self.attention = attention

    def attend(
        self, kv: KVPages, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """See PagedAttention.attend."""
        keys, values = kv.pools[layer].unbind()
        return self.attention.attend(
            self._kernels, query, keys, values, scoring, (key, value), kv.scales[layer]
        )

    def run_layer(
        self,
        whole: WholeLayer,
        kv: KVPages,
        layer: int,
        hidden: Tensor,
        rotation: Rotation,
        scoring: Scoring,
    ) -> Tensor | None:
        """See PagedAttention.run_layer. A whole layer has neither soft cap nor sinks."""
        assert isinstance(whole, NativeLayer)
        if not _is_simple(scoring):
            return None
        keys, values = kv.pools[layer].unbind()
        return whole(hidden, rotation, self.attention, keys, values, scoring, kv.scales[layer])


class TiledStack:
    """Layers straight over the pages; see LayerStack."""

    def __init__(self, stack: NativeStack) -> None:
        self._stack = stack

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        seen: Sequence[PagedAttention],
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See LayerStack.__call__."""
        tiled = [own.attention for own in seen if isinstance(own, TiledPages)]
        return self._stack(hidden, rotation, tiled, wanted)


def _is_simple(scoring: Scoring) -> bool:
    return scoring.softcap is None and scoring.sinks is None


def _is_plain(bias: Tensor | None, num_rows: int, num_keys: int) -> bool:
    """True for what the kernels read: one float32 mask for all heads. Models may make others."""
    return bias is None or (
        bias.dtype == torch.float32
        and bias.shape == (1, num_rows, num_keys)
        and bias.stride(-1) == 1
    )
