"""What a fused decoder layer does between its matrix products: by torch, or by kernels.

torch's operations are those of the model's own layer, so their bits are too. A kernel sums the
squares of a norm in another order, and has its own exponential, so the last bit before a rounding
may differ; every rounding stays where it was.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from blockdraft.kernels.cpu.layer import DecoderLayer, Norm
from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import (
    add_rms_norm,
    attends_over,
    gated_silu,
    rms_norm,
    rotate_heads_,
)
from blockdraft.models.packed import PackedLinear

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [1, tokens, head_dim]; the halves of a head turn by the same angles."""

LayerLinears = tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]
"""The products of a layer: queries, keys and values; output of the attention; gate and up; down."""


class LayerOperations:
    """By torch and the layer's own modules.

    Args:
        layer: a pre-norm decoder layer of transformers with a gated MLP.
    """

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        self._activation = layer.mlp.act_fn
        self._head_norms: tuple[Any, Any] | None = None
        if hasattr(attention, "q_norm"):
            self._head_norms = attention.q_norm, attention.k_norm
        widths = [p.out_features for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.num_heads = [width // attention.head_dim for width in widths]
        """Of queries, keys and values."""

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm before the attention."""
        normed: Tensor = self._norms[0](hidden)
        return normed

    def add_and_norm(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The sum of residual and attention, and the norm before the MLP of it."""
        total = hidden + attended
        return total, self._norms[1](total)

    def rotate(self, heads: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """[1, tokens, all heads, head_dim] -> q, k and v, each [1, heads, tokens, head_dim].

        `rotation`: cos and signed sin, each [1, tokens, 1, head_dim]. May overwrite `heads`.
        """
        num_q, num_k, _ = self.num_heads
        turned = heads[:, :, : num_q + num_k]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            turned = torch.cat((q_norm(turned[:, :, :num_q]), k_norm(turned[:, :, num_q:])), dim=2)
        cos, signed_sin = rotation
        swapped = turned.roll(turned.shape[-1] // 2, dims=-1)
        turned = (turned * cos).add_(swapped.mul_(signed_sin))
        q, k = turned[:, :, :num_q], turned[:, :, num_q:]
        return q.transpose(1, 2), k.transpose(1, 2), heads[:, :, num_q + num_k :].transpose(1, 2)

    def gated(self, gate_up: Tensor) -> Tensor:
        """[1, tokens, 2 * intermediate] -> [1, tokens, intermediate]."""
        gate, up = gate_up.chunk(2, dim=-1)
        result: Tensor = self._activation(gate) * up
        return result


class KernelOperations(LayerOperations):
    """By kernels. Norms are read as Llama's: rounded before the weight and after it.

    Raises:
        AttributeError: a norm keeps its weight or its epsilon elsewhere.
    """

    def __init__(self, layer: Any, kernels: Library) -> None:
        super().__init__(layer)
        self._kernels = kernels
        self._head_dim: int = layer.self_attn.head_dim
        self._first, self._second = (_weight_and_eps(norm) for norm in self._norms)
        self._has_silu = is_silu(self._activation)
        self._head_weights: tuple[Tensor, Tensor, float] | None = None
        if self._head_norms is not None:
            (query, eps), (key, _) = (_weight_and_eps(norm) for norm in self._head_norms)
            self._head_weights = query, key, eps

    def whole_layer(self, linears: LayerLinears) -> DecoderLayer | None:
        """The layer in one call; None if that cannot be."""
        norms = self._first, self._second
        if not self._has_silu:
            return None
        return whole_layer(
            self._kernels, linears, norms, self._head_weights, self._head_dim, rounds_first=True
        )

    def norm(self, hidden: Tensor) -> Tensor:
        """See LayerOperations."""
        return rms_norm(self._kernels, hidden, *self._first, rounds_first=True)

    def add_and_norm(self, hidden: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """See LayerOperations."""
        return add_rms_norm(self._kernels, attended, hidden, *self._second, rounds_first=True)

    def rotate(self, heads: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """See LayerOperations; in place."""
        num_q, num_k, _ = self.num_heads
        rotate_heads_(self._kernels, heads, num_q, num_k, *rotation, self._head_weights)
        q, k, v = heads.transpose(1, 2).split_with_sizes(self.num_heads, dim=1)
        return q, k, v

    def gated(self, gate_up: Tensor) -> Tensor:
        """See LayerOperations."""
        return gated_silu(self._kernels, gate_up) if self._has_silu else super().gated(gate_up)


def whole_layer(
    kernels: Library,
    linears: LayerLinears,
    norms: tuple[Norm, Norm],
    head_norms: tuple[Tensor, Tensor, float] | None,
    head_dim: int,
    *,
    rounds_first: bool,
) -> DecoderLayer | None:
    """A layer in one call, see DecoderLayer.

    None if kernels do not compute its products, or do not attend over heads of its size.
    """
    if not attends_over(head_dim):
        return None
    qkv, o, gate_up, down = (linear.by_kernels for linear in linears)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    products = qkv, o, gate_up, down
    return DecoderLayer(kernels, products, norms, head_norms, rounds_first=rounds_first)


def is_silu(activation: object) -> bool:
    """True for torch's and for transformers' own."""
    return isinstance(activation, (nn.SiLU, type(ACT2FN["silu"])))


def _weight_and_eps(norm: Any) -> tuple[Tensor, float]:
    return norm.weight.detach().contiguous(), norm.variance_epsilon
