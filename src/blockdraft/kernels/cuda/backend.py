"""A CUDA device with Triton kernels; see `kernels.interface.Backend`.

Every row has the bits that it has alone: a program computes one row, or a tile of rows that has the
bits of all others. What the kernels do not know is left to torch's operations, which promise
nothing on a card; the check of a load says whether a model holds.
"""

import logging
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.kernels.cuda.attention import RowTables
from blockdraft.kernels.cuda.check import attention_fault
from blockdraft.kernels.cuda.ops import (
    MAX_HEAD_DIM,
    Seen,
    add_rms_norm,
    attention,
    gated_silu,
    packed,
    product,
    rms_norm,
    rotated_heads,
)
from blockdraft.kernels.cuda.tiles import ONE, Tiles
from blockdraft.kernels.interface import (
    TILE,
    Linear,
    PagedRows,
    PagedTables,
    Rotation,
    RowRule,
    Scoring,
    Span,
)
from blockdraft.kernels.torch.activations import is_silu
from blockdraft.kernels.torch.backend import TorchBackend
from blockdraft.kernels.weights import AnyWeight, Norm

logger = logging.getLogger(__name__)


class TritonLinear:
    """A linear layer in tiles; see Linear. The weight is not copied."""

    keeps_rows = True

    def __init__(self, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        # A tensor of its own: whoever frees the model's weight must not empty this one.
        self._weight = packed(weight.detach())
        self._bias = None if bias is None else packed(bias.detach())
        self._tiles = tiles

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        num_outputs, num_inputs = self.shape
        tile = self._tiles.tile(x.numel() // num_inputs, num_outputs, num_inputs)
        return product(x, self._weight, self._bias, tile)


class TritonBackend(TorchBackend):
    """See the module."""

    known: ClassVar[frozenset[torch.dtype]] = frozenset(ONE)
    """The precisions that there are kernels for."""
    packs = True
    """See Backend.packs: layers that are fused have their weights side by side."""
    reads_pages = True
    takes_int8_pages = False

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str, *, one_tile: bool = False
    ) -> None:
        """one_tile: a product has the same tile for any number of rows."""
        super().__init__(dtype)
        self._device = device
        self._tiles = Tiles(dtype, device, one=one_tile)
        self._attends: dict[int, bool] = {}

    @property
    def has_many_tiles(self) -> bool:
        """Whether products of few rows have other tiles than those of many."""
        return self._tiles.are_many

    @property
    def rule(self) -> RowRule:
        """See Backend.rule."""
        return RowRule(row_multiple=1, max_rows=512, key_tile=TILE, replaces_norms=True)

    def attends_over(self, head_dim: int) -> bool:
        """See Backend.attends_over: what passes its check on the card."""
        if head_dim > MAX_HEAD_DIM:
            return False
        if head_dim not in self._attends:
            self._attends[head_dim] = self._may_attend(head_dim)
        return self._attends[head_dim]

    def _may_attend(self, head_dim: int) -> bool:
        try:
            fault = attention_fault(self, self.dtype, self._device, head_dim)
        except Exception as error:  # too large for the memory of the card's processors, too
            if is_out_of_memory(error):
                raise
            fault = f"{type(error).__name__}: {error}".split("\n")[0]
        if fault is not None:
            logger.warning("no Triton kernels for heads of %d: %s", head_dim, fault)
        return fault is None

    def gates(self, activation: object) -> bool:
        """See Backend.gates."""
        return is_silu(activation)

    def linear(self, weight: AnyWeight, bias: Tensor | None = None) -> Linear:
        """See Backend.linear."""
        if not isinstance(weight, Tensor):
            return super().linear(weight, bias)
        is_own = weight.dtype == self.dtype
        tiles = self._tiles if is_own else Tiles(weight.dtype, self._device, one=True)
        return TritonLinear(weight, bias, tiles)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Backend.norm."""
        return rms_norm(x, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See Backend.add_norm."""
        return add_rms_norm(x, residual, norm)

    def rotate_(
        self,
        heads: Tensor,
        num_heads: tuple[int, int, int],
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.rotate_; `heads` stays as it is."""
        num_queries, num_keys, _ = num_heads
        num_turned = num_queries + num_keys
        turned = rotated_heads(heads, num_turned, num_queries, rotation, norms)
        queries, keys = turned.split_with_sizes((num_queries, num_keys), dim=-2)
        return queries, keys, heads[..., num_turned:, :]

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """See Backend.gate."""
        if not self.gates(activation):
            return super().gate(gate_up, activation)
        return gated_silu(gate_up)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """See Backend.attend. The keys are one long page, and the bias says who is seen."""
        num_rows, num_keys = query.shape[1], key.shape[1]
        if key.shape != value.shape or not _is_mask(bias, num_rows, num_keys):
            return super().attend(query, key, value, bias, scoring)
        ranges = torch.tensor([0, num_keys], device=query.device).expand(num_rows, 2).contiguous()
        seen = Seen(ranges, bias=None if bias is None else packed(bias[0]))
        return attention(query, key, value, seen, scoring)

    def paged_rows(self, spans: Sequence[Span], slots: Tensor, row_multiple: int) -> PagedRows:
        """See Backend.paged_rows. Any number of rows will do."""
        return RowTables.of(spans, slots)

    def rows_of_tables(self, slots: Tensor, tables: PagedTables) -> PagedRows | None:
        """See Backend.rows_of_tables."""
        return RowTables(slots, tables, slots.shape[0])


def _is_mask(bias: Tensor | None, num_rows: int, num_keys: int) -> bool:
    """True for one float32 bias for all heads. Models may make others."""
    return bias is None or (bias.dtype == torch.float32 and bias.shape == (1, num_rows, num_keys))
