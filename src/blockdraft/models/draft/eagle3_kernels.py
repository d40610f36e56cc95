"""The forward of EAGLE-3 in few and large operations of a backend, for inference.

The same computation as `Eagle3Model`. Sums are in float32 throughout, so values differ from it in
the last bits; the choice of the target decides what is kept, so output never depends on them.
"""

from functools import partial

import torch
from torch import Tensor

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Backend
from blockdraft.models.draft.attention import ScoreMask, attend
from blockdraft.models.draft.context import ContextKV, LayerKV
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.modules import layer_parts, rotate
from blockdraft.models.layers.layer import DecoderLayer
from blockdraft.models.layers.packed import side_by_side


class KernelEagle3:
    """What a drafter asks of an `Eagle3Model`, from its weights of this moment."""

    def __init__(self, model: Eagle3Model, backend: Backend, in_int8: bool) -> None:
        layer = model.midlayer
        attention = layer.self_attn
        joined = partial(side_by_side, in_int8=in_int8)
        self._backend, self._config = backend, model.config
        self._rotation = model.rotary
        self._hidden_norm, self._final_norm = layer.hidden_norm.parts, model.norm.parts
        parts = layer_parts(
            *(attention, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm),
            in_int8=in_int8,
        )
        self._token_norm, self._head_norms = parts.norm, parts.head_norms
        self._layer = DecoderLayer(backend, parts, is_usual=False)
        # A context needs no queries, which would be most of its work.
        self._kv = joined(attention.k_proj, attention.v_proj)
        self._fc = joined(model.fc)
        self._input_norm = None if model.input_norm is None else model.input_norm.parts
        self._feature_norms = [norm.parts for norm in model.feature_norms()]
        self._head = joined(model.lm_head)

    def fuse(self, features: Tensor) -> Tensor:
        """See `Eagle3Model.fuse`."""
        if self._input_norm is not None:
            features = self._backend.norm(features, self._input_norm)
        if self._feature_norms:
            parts = features.chunk(self._config.num_features, dim=-1)
            normed = (
                self._backend.norm(own.contiguous(), norm)
                for own, norm in zip(parts, self._feature_norms, strict=True)
            )
            features = torch.cat([*normed], dim=-1)
        return self._fc(features)

    def keys_values(self, embeddings: Tensor, hidden: Tensor, positions: Tensor) -> LayerKV:
        """See `Eagle3Model.keys_values`."""
        kv = self._kv(self._input(embeddings, self._backend.norm(hidden, self._hidden_norm)))
        k, v = kv.view(*kv.shape[:2], -1, self._config.head_dim).chunk(2, dim=2)
        if self._head_norms is not None:
            k = self._backend.norm(k.contiguous(), self._head_norms[1])
        k = rotate(k, self._rotation(positions, k.dtype))
        return k.transpose(1, 2), v.transpose(1, 2)

    def __call__(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        context: ContextKV,
        mask: ScoreMask = None,
    ) -> Tensor:
        """See `Eagle3Model.forward`."""
        backend, layer, sizes = self._backend, self._layer, hidden.shape[:2]
        cos, signed_sin = self._rotation(positions, embeddings.dtype)
        rotation = cos.flatten(0, 1), signed_sin.flatten(0, 1)

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (part.view(-1, *sizes, part.shape[-1]).transpose(0, 1) for part in (q, k, v))
            out = attend(q, *context.extend(0, k, v), mask)
            return out.transpose(1, 2).flatten(0, 1)

        rows = hidden.flatten(0, 1)
        normed = backend.norm(rows, self._hidden_norm)
        x = self._input(embeddings.flatten(0, 1), normed)
        residual = normed if self._config.norm_before_residual else rows
        attended = layer.attention(x, rotation, attention)
        rows, normed = backend.add_norm(attended, residual, layer.parts.mlp_norm)
        out = (rows + layer.mlp(normed)).view(hidden.shape)
        return backend.norm(out, self._final_norm) if self._config.norm_output else out

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Eagle3Model.logits`."""
        if not self._config.norm_output:
            hidden = self._backend.norm(hidden, self._final_norm)
        return self._head(hidden)

    def _input(self, embeddings: Tensor, normed: Tensor) -> Tensor:
        """Tokens and hidden states side by side, both normed."""
        return torch.cat((self._backend.norm(embeddings, self._token_norm), normed), dim=-1)


def kernel_eagle3(model: Eagle3Model, *, in_int8: bool = False) -> KernelEagle3 | None:
    """The model's forward from packed weights; None where the backend packs none.

    Uses the weights of this moment, or the closest in int8.
    """
    weight = model.fc.weight
    backend = backend_for(weight.dtype, weight.device, [model.config.head_dim])
    if not (backend.packs and backend.gates(model.midlayer.mlp.activation)):
        return None
    with torch.no_grad():
        return KernelEagle3(model, backend, in_int8)
