"""Forwards of few rows in a few fixed shapes, which a card can replay as CUDA graphs.

The inputs of a shape lie in memory that stays; see `StaticRows`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import Backend
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.attention.static_rows import StaticRows, reads_tables, shape_of
from blockdraft.models.layers.graphs import Graphs
from blockdraft.models.target.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class StaticOutput:
    """logits: [rows, V], of the wanted rows first. captured: by layer, [1, rows, hidden]."""

    logits: Tensor
    captured: dict[int, Tensor]

    def copied(self) -> "StaticOutput":
        """The same in other memory."""
        captured = {index: value.clone() for index, value in self.captured.items()}
        return StaticOutput(self.logits.clone(), captured)


Compute = Callable[[AttentionPlan, Tensor, Tensor, Tensor], StaticOutput]
"""Of a plan, token ids and positions [1, rows] each, and the rows wanted [rows]."""


class StaticForwards:
    """The forwards of a target over its pages; see `static_forwards`.

    On a card one forward of each shape is captured, and replayed from then on.
    """

    def __init__(
        self, backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
    ) -> None:
        self._backend, self._kv, self._compute, self._device = backend, kv, compute, device
        self._inputs: dict[int, StaticInputs] = {}
        self.graphs = Graphs("the target", device, StaticOutput.copied)

    def __call__(self, rows: PackedRows) -> StaticOutput | None:
        """What the rows give; None if they fit no shape."""
        shape = shape_of(len(rows))
        if shape is None:
            return None
        if shape not in self._inputs:
            self._inputs[shape] = StaticInputs(shape, self._device)
        inputs = self._inputs[shape]
        if not inputs.write(rows):
            return None
        return self.graphs(shape, lambda: self._run(inputs))

    def _run(self, inputs: "StaticInputs") -> StaticOutput:
        plan = inputs.plan(self._backend, self._kv)
        positions = inputs.places[:1]
        return self._compute(plan, inputs.token_ids[None], positions, inputs.wanted)


def static_forwards(
    backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
) -> StaticForwards | None:
    """Forwards in fixed shapes; None if the backend reads no tables."""
    reads = reads_tables(backend, device)
    return StaticForwards(backend, kv, compute, device) if reads else None


class StaticInputs(StaticRows):
    """The inputs of forwards of `num_rows` rows."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        super().__init__(num_rows, device, num_own=2)
        self.token_ids, self.wanted = self.own

    def write(self, rows: PackedRows) -> bool:
        """Write these rows, and others that fill up; False if they have too many keys."""
        num_fill = self._num_rows - len(rows)
        token_ids = rows.token_ids + rows.token_ids[-1:] * num_fill
        wanted = rows.wanted + [0] * (self._num_rows - len(rows.wanted))
        return self.write_rows(rows.spans, rows.slots, rows.positions, (token_ids, wanted))
