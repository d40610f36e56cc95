"""The reference backend; see `kernels.interface.Backend`."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.interface import (
    Backend,
    KVPages,
    Largest,
    Linear,
    PagedRows,
    Rotation,
    RowRule,
    Scoring,
    Span,
)
from blockdraft.kernels.torch.attention import GroupedRows, grouped_attention
from blockdraft.kernels.torch.groups import GroupLinear
from blockdraft.kernels.torch.int8 import Int8Linear
from blockdraft.kernels.torch.rules import row_rule
from blockdraft.kernels.weights import AnyWeight, GroupWeight, Int8Weight, Norm


class TorchLinear:
    """torch's product with the weight itself; see Linear."""

    keeps_rows = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape, self.dtype = weight.shape, weight.dtype
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x, self._weight, self._bias)


class TorchBackend(Backend):
    """torch's operations in one precision, on any device."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @property
    def rule(self) -> RowRule:
        """See Backend.rule."""
        return row_rule(self.dtype)

    def linear(self, weight: AnyWeight, bias: Tensor | None = None) -> Linear:
        """See Backend.linear."""
        if isinstance(weight, GroupWeight):
            return GroupLinear(weight, bias)
        if isinstance(weight, Int8Weight):
            return Int8Linear(weight, bias)
        return TorchLinear(weight, bias)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See Backend.norm. Llama's operations, or torch's own, which round once."""
        if not norm.rounds_first:
            return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return norm.weight * (wide * torch.rsqrt(variance + norm.eps)).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """See Backend.add_norm."""
        total = residual + x
        return total, self.norm(total, norm)

    def rotate_(
        self,
        heads: Tensor,
        num_heads: tuple[int, int, int],
        rotation: Rotation,
        norms: tuple[Norm, Norm] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See Backend.rotate_."""
        num_queries, num_keys, _ = num_heads
        queries, keys, values = heads.split_with_sizes(num_heads, dim=-2)
        turned = heads[..., : num_queries + num_keys, :]
        if norms is not None:
            turned = torch.cat((self.norm(queries, norms[0]), self.norm(keys, norms[1])), dim=-2)
        cos, signed_sin = rotation
        swapped = turned.roll(turned.shape[-1] // 2, dims=-1)
        turned = (turned * cos).add_(swapped.mul_(signed_sin))
        return turned[..., :num_queries, :], turned[..., num_queries:, :], values

    def gate(self, gate_up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        """See Backend.gate."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """See Backend.attend."""
        heads = query.view(key.shape[0], -1, *query.shape[1:])
        output = grouped_attention(heads[:, None], key, value, bias, scoring)
        return output[:, 0].flatten(0, 1).transpose(0, 1)

    def paged_rows(self, spans: Sequence[Span], slots: Tensor, row_multiple: int) -> PagedRows:
        """See Backend.paged_rows."""
        return GroupedRows(spans, slots, row_multiple)

    def largest(self, scores: Tensor, num: int) -> Largest:
        """See Backend.largest."""
        # Always: to ask first whether there is a NaN would be another wait for a card.
        scores = scores.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        values, places = scores.topk(min(num, scores.shape[1]))
        totals = (scores - values[:, :1]).exp_().sum(1)
        return Largest(values.cpu().numpy(), places.cpu().numpy(), totals.cpu().numpy())

    def store_context(
        self, kv: KVPages, slots: Tensor, projected: Tensor, key_norms: Norm, rotation: Rotation
    ) -> None:
        """See Backend.store_context."""
        keys, values = projected.unbind(2)
        weight = key_norms.weight[:, None]
        keys = F.rms_norm(keys, keys.shape[-1:], eps=key_norms.eps) * weight
        cos, signed_sin = (part[:, None] for part in rotation)
        keys = keys * cos + keys.roll(keys.shape[-1] // 2, dims=-1) * signed_sin
        for layer in range(projected.shape[1]):
            kv.write(layer, slots, keys[:, layer].transpose(0, 1), values[:, layer].transpose(0, 1))
