"""The draft keys and values of all layers from one product."""

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.kernels.interface import Rotation
from blockdraft.kernels.weights import Norm
from blockdraft.models.draft.context import LayerKV
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.modules import rotate
from blockdraft.models.layers.packed import linear_of


class ContextProjection:
    """`DraftModel.project_context` with the layers side by side, for inference.

    A few tokens at a time cost more in calls than in numbers. Uses the weights of this moment,
    or the closest in int8.
    """

    def __init__(self, model: DraftModel, *, in_int8: bool = False) -> None:
        self._model = model
        attentions = [layer.self_attn for layer in model.draft_layers()]
        by_layer = [a.context_projections for a in attentions]
        projections = [p for both in by_layer for p in both]
        biases = [p.bias.detach() for p in projections if p.bias is not None]
        # One product, unless layers have contexts of their own.
        together = by_layer if model.config.fuses_by_layer else [projections]
        self._linears = [
            linear_of(torch.cat([p.weight.detach() for p in own]), in_int8=in_int8)
            for own in together
        ]
        self._bias = torch.cat(biases) if biases else None
        # [layers, head_dim]: heads of a layer share a norm. In DFlash every layer has them.
        norms = torch.stack([both[1].weight for a in attentions if (both := a.head_norms)])
        config = model.config
        self.key_norms = Norm(norms, config.rms_norm_eps, rounds_first=True)
        self._shape = (len(attentions), 2, config.num_key_value_heads, config.head_dim)

    def projected(self, features: Tensor, positions: Tensor) -> tuple[Tensor, Rotation]:
        """Keys and values as the product leaves them, and the rotation that the keys lack.

        features: [1, c, ..] at positions [1, c]. Returns [c, layers, 2, kv_heads, head_dim], keys
        before values, and cos and signed sin, [1, c, 1, head_dim] each.
        """
        hidden, rotation = self._model.context_inputs(features, positions)
        contexts = hidden[:, 0] if self._model.config.fuses_by_layer else hidden
        both = zip(self._linears, contexts, strict=True)
        projected = torch.cat([linear(own) for linear, own in both], dim=-1)
        if self._bias is not None:
            projected = projected + self._bias
        return projected.view(-1, *self._shape), rotation

    def __call__(self, features: Tensor, positions: Tensor) -> list[LayerKV]:
        """Features [1, c, ..] at positions [1, c] -> keys and values of each layer."""
        projected, (cos, signed_sin) = self.projected(features, positions)
        # [c, layers, kv_heads, head_dim] each
        k, v = projected.unbind(2)
        weight, eps = self.key_norms.weight[:, None], self.key_norms.eps
        k = F.rms_norm(k, k.shape[-1:], eps=eps) * weight
        k = rotate(k, (cos[0, :, None], signed_sin[0, :, None]))
        # Each [layers, 1, kv_heads, c, head_dim].
        keys, values = k.permute(1, 2, 0, 3)[:, None], v.permute(1, 2, 0, 3)[:, None]
        return list(zip(keys, values, strict=True))
