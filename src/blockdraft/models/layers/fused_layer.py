"""Decoder layers of the common kind in fewer and larger operations.

A step of a small model spends as long between its matrix products as in them. A fused layer makes
one product of queries, keys and values, one of gate and up projection, and rotates queries and keys
together. Every rounding stays where the model's own layer has it.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from blockdraft.kernels.backends import reference_for
from blockdraft.kernels.interface import LayerParts, Rotation, Scoring
from blockdraft.models.attention.plan import LayerAttention, PlanInForce
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.layers.layer import DecoderLayer
from blockdraft.models.layers.norms import llama_norm
from blockdraft.models.layers.packed import side_by_side
from blockdraft.models.supported import CACHES


class RotationSigns:
    """Moves the sign of the rotated first half into the sine: once a forward, not once a layer."""

    def __init__(self) -> None:
        self._of: Rotation | None = None
        self._signed: Rotation | None = None

    def __call__(self, rotation: Rotation) -> Rotation:
        """cos and signed sin, each [1, tokens, 1, head_dim]."""
        if self._signed is None or rotation is not self._of:
            self._of, self._signed = rotation, with_sign(rotation)
        return self._signed


def with_sign(rotation: Rotation) -> Rotation:
    """cos and sin [1, tokens, head_dim] -> cos and signed sin, each [1, tokens, 1, head_dim]."""
    cos, sin = rotation
    first, second = sin.chunk(2, dim=-1)
    signed = torch.cat((-first, second), dim=-1)
    return cos.contiguous()[:, :, None], signed[:, :, None]


class FusedLayer:
    """Calls like a pre-norm decoder layer of transformers with rotated heads and a gated MLP.

    Args:
        layer: the decoder layer; its weights are copied. What happens between its products is
            the reference's at first, see `self.layer`.
        constants: what its attention module gives to the attention function beside the tensors.
        signs: shared by the layers of a model.
        in_force: the plan of the target whose layer it is.
    """

    def __init__(
        self, layer: Any, constants: dict[str, Any], signs: RotationSigns, in_force: PlanInForce
    ) -> None:
        weight: Tensor = layer.self_attn.q_proj.weight
        self.layer = DecoderLayer(reference_for(weight.dtype, weight.device), layer_parts(layer))
        self.attention = LayerAttention(
            Scoring(constants["scaling"], constants.get("softcap"), constants.get("s_aux")),
            Visibility(window=constants.get("sliding_window")),
        )
        self._module = layer.self_attn
        self._constants = constants
        self._signs = signs
        self._in_force = in_force

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        position_embeddings: Rotation,
        **kwargs: Any,
    ) -> Tensor:
        """[1, tokens, hidden] -> [1, tokens, hidden], with the arguments of the model's own layer.

        `kwargs` go to the attention function, but for the cache.
        """
        rotation, index = self._signs(position_embeddings), self._module.layer_idx
        if (plan := self._in_force.plan) is not None:
            return self.layer.over_pages(plan, index, self.attention, hidden_states, rotation)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = next((kwargs.pop(name) for name in CACHES if name in kwargs), None)
            if cache is not None:
                k, v = cache.update(k, v, index)
            function = AttentionInterface()[self._module.config._attn_implementation]
            arguments = self._constants | kwargs
            attended: Tensor = function(self._module, q, k, v, attention_mask, **arguments)[0]
            return attended

        return self.layer.in_parts(hidden_states, rotation, attend)


def layer_parts(layer: Any) -> LayerParts:
    """Those of a pre-norm decoder layer of transformers, its weights copied where they are packed.

    Norms are read as Llama's.

    Raises:
        AttributeError: the layer keeps a part elsewhere.
    """
    attention, mlp = layer.self_attn, layer.mlp
    q_proj, k_proj, v_proj = attention.q_proj, attention.k_proj, attention.v_proj
    num_queries, num_keys, num_values = (
        projection.out_features // attention.head_dim for projection in (q_proj, k_proj, v_proj)
    )
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = llama_norm(attention.q_norm), llama_norm(attention.k_norm)
    return LayerParts(
        qkv=side_by_side(q_proj, k_proj, v_proj),
        o=side_by_side(attention.o_proj),
        gate_up=side_by_side(mlp.gate_proj, mlp.up_proj),
        down=side_by_side(mlp.down_proj),
        norm=llama_norm(layer.input_layernorm),
        mlp_norm=llama_norm(layer.post_attention_layernorm),
        head_norms=head_norms,
        num_heads=(num_queries, num_keys, num_values),
        head_dim=attention.head_dim,
        activation=mlp.act_fn,
    )
