"""Draft forwards of few rows in a few fixed shapes, which a card can replay as CUDA graphs.

A block has few rows, so that a card is done with each operation long before the next one is asked
for.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import Backend, Rotation, Span
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.attention.static_rows import StaticRows, reads_tables, shape_of
from blockdraft.models.layers.graphs import Graphs

Compute = Callable[[AttentionPlan, Tensor, Rotation], Tensor]
"""Of a plan, embeddings [rows, D] and rotations [rows, head_dim] hidden states [rows, D]."""


class StaticBlocks:
    """The draft forwards over the pages of a context; see `static_blocks`."""

    def __init__(
        self, backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
    ) -> None:
        self._backend, self._kv, self._compute, self._device = backend, kv, compute, device
        self._inputs: dict[int, _Inputs] = {}
        self.graphs = Graphs("the drafter", device, torch.clone)

    def __call__(
        self, spans: Sequence[Span], slots: Sequence[int], x: Tensor, rotation: Rotation
    ) -> Tensor | None:
        """Hidden states of the rows of some spans; None if they fit no shape."""
        shape = shape_of(len(slots))
        if shape is None:
            return None
        if shape not in self._inputs:
            self._inputs[shape] = _Inputs(shape, self._device, x, rotation)
        inputs = self._inputs[shape]
        positions = chain(*(range(own.start, own.start + own.num_rows) for own in spans))
        if not inputs.rows.write_rows(spans, slots, list(positions)):
            return None
        for place, part in zip(inputs.values, (x, *rotation), strict=True):
            place[: len(slots)] = part
        return self.graphs(shape, lambda: self._run(inputs))[: len(slots)]

    def _run(self, inputs: "_Inputs") -> Tensor:
        x, cos, signed_sin = inputs.values
        return self._compute(inputs.rows.plan(self._backend, self._kv), x, (cos, signed_sin))


def static_blocks(
    backend: Backend, kv: PagedKV, compute: Compute, device: torch.device
) -> StaticBlocks | None:
    """Draft forwards in fixed shapes; None if the backend reads no tables."""
    reads = reads_tables(backend, device)
    return StaticBlocks(backend, kv, compute, device) if reads else None


class _Inputs:
    """Of draft forwards of `num_rows` rows.

    values: embeddings and rotations, zeros where no row was written, like these [any, ..].
    """

    def __init__(self, num_rows: int, device: torch.device, x: Tensor, rotation: Rotation) -> None:
        self.rows = StaticRows(num_rows, device)
        with torch.inference_mode(False):  # as in StaticRows
            self.values = [
                torch.zeros((num_rows, *part.shape[1:]), dtype=part.dtype, device=device)
                for part in (x, *rotation)
            ]
