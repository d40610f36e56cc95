"""What the rows of a forward over pages attend to, for target and drafter alike."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.heads import filled
from blockdraft.kernels.interface import (
    Backend,
    LayerStack,
    PagedAttention,
    PagedRows,
    Rotation,
    Scoring,
    Span,
    WholeLayer,
)
from blockdraft.models.attention.visibility import CAUSAL, Visibility


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """What comes with a layer's attention beside the tensors."""

    scoring: Scoring
    visibility: Visibility = CAUSAL


def kinds_of(attentions: Sequence[LayerAttention]) -> tuple[list[Visibility], list[int]]:
    """The rules of some layers, each once, and of each layer the place of its rule."""
    kinds = list(dict.fromkeys(attention.visibility for attention in attentions))
    return kinds, [kinds.index(attention.visibility) for attention in attentions]


class AttentionPlan:
    """Where each row's key and value go, and which keys in which pages it sees.

    Args:
        backend: what computes.
        kv: the pages, of all layers.
        spans: the rows of each sequence, or of each leaf of a tree; they follow each other from
            row 0 on.
        slots: [rows], where keys and values go, see Pages.slots. Rows behind the spans only fill
            up the forward.
        row_multiple: of the forward's rule.
    """

    def __init__(
        self,
        backend: Backend,
        kv: PagedKV,
        spans: Sequence[Span],
        slots: Tensor,
        row_multiple: int = 1,
    ) -> None:
        self._kv = kv
        self._spans = spans
        self._device = slots.device
        self._rows = backend.paged_rows(spans, slots, row_multiple)
        self._seeing: dict[Visibility, PagedAttention] = {}

    def attend(
        self, layer: int, attention: LayerAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store a layer's keys and values, then attend; see PagedAttention.attend.

        Heads may be smaller than the pages have them, and values smaller than keys.
        """
        over, size = self._over(attention.visibility), self._kv.pools[layer].shape[-1]
        queries, keys, values = (filled(heads, size) for heads in (query, key, value))
        output = over.attend(self._kv, layer, queries, keys, values, attention.scoring)
        return output[..., : value.shape[-1]]

    def run_layer(
        self,
        whole: WholeLayer,
        layer: int,
        attention: LayerAttention,
        hidden: Tensor,
        rotation: Rotation,
    ) -> Tensor | None:
        """A whole layer in one call, hidden [.., rows, size]; None if it must run in parts."""
        over = self._over(attention.visibility)
        return over.run_layer(whole, self._kv, layer, hidden, rotation, attention.scoring)

    def run_stack(
        self,
        stack: LayerStack,
        kinds: Sequence[Visibility],
        hidden: Tensor,
        rotation: Rotation,
        wanted: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All layers in one call; see LayerStack. kinds: of its layers, see `kinds_of`."""
        return stack(hidden, rotation, [self._over(own) for own in kinds], wanted)

    def _over(self, visibility: Visibility) -> PagedAttention:
        if visibility not in self._seeing:
            self._seeing[visibility] = self._rows.seeing(self._ranges(visibility))
        return self._seeing[visibility]

    def _ranges(self, visibility: Visibility) -> Tensor:
        """[rows of the spans, 2]: the keys that each row sees."""
        found = [
            visibility.key_range(position, span.end)
            for span in self._spans
            for position in range(span.start, span.start + span.num_rows)
        ]
        if visibility.window is not None:
            # A row that only fills up a block may see nothing; one key keeps it a number.
            found = [(min(first, end - 1), end) for first, end in found]
        return torch.tensor(found, device=self._device)


class TablePlan(AttentionPlan):
    """The plan of rows whose places are known to the device only.

    Args:
        rows: of a backend that reads tables.
        kv: the pages, of all layers.
        places: [2, rows], positions, and the ends of the keys that rows may see.
    """

    def __init__(self, rows: PagedRows, kv: PagedKV, places: Tensor) -> None:
        self._rows, self._kv, self._places = rows, kv, places
        self._seeing: dict[Visibility, PagedAttention] = {}

    def _ranges(self, visibility: Visibility) -> Tensor:
        ranges = visibility.key_ranges(*self._places)
        if visibility.window is not None:  # see AttentionPlan
            ranges[:, 0] = torch.minimum(ranges[:, 0], ranges[:, 1] - 1)
        return ranges


class SpreadPlan(AttentionPlan):
    """The plans of the same rows on several devices; a layer follows that of its own device."""

    def __init__(self, plans: Mapping[torch.device, AttentionPlan]) -> None:
        self._plans = plans

    def attend(
        self, layer: int, attention: LayerAttention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """See AttentionPlan.attend."""
        return self._plans[query.device].attend(layer, attention, query, key, value)

    def run_layer(
        self,
        whole: WholeLayer,
        layer: int,
        attention: LayerAttention,
        hidden: Tensor,
        rotation: Rotation,
    ) -> Tensor | None:
        """See AttentionPlan.run_layer."""
        return self._plans[hidden.device].run_layer(whole, layer, attention, hidden, rotation)


class PoolNumbers:
    """Which pool of keys and values each attention of a forward has, in the order of the calls.

    A layer has the pool of its number. What it attends again, as the two halves of differential
    attention do, has one of its own: the last pool, the one before it, and so on.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._num_again = 0

    def next(self, layer: int) -> int:
        """The pool of a layer's next attention; negative numbers count from the end."""
        if layer not in self._seen:
            self._seen.add(layer)
            return layer
        self._num_again += 1
        return -self._num_again


class PlanInForce:
    """Holds the plan of the forward that runs, for whoever computes attention in it.

    A target has one, and gives it to the attention modules of its model.
    """

    def __init__(self) -> None:
        self.plan: AttentionPlan | None = None
        self._pools = PoolNumbers()

    def pool_of(self, layer: int) -> int:
        """Where a layer that attends now finds its keys and values; see PoolNumbers."""
        return self._pools.next(layer)

    @contextmanager
    def follow(self, plan: AttentionPlan) -> Iterator[None]:
        """Let a forward follow a plan."""
        self.plan, self._pools = plan, PoolNumbers()
        try:
            yield
        finally:
            self.plan = None
