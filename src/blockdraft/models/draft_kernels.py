"""The forward of a draft block by kernels: few and large operations, for inference on a CPU.

The same computation as `DraftModel.forward`. Sums are in float32 throughout, so values differ from
it in the last bits; the choice of the target decides what is kept, so output never depends on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.kernels.cpu.library import Library
from blockdraft.kernels.cpu.ops import (
    add_rms_norm,
    gated_silu,
    kernels_for_heads,
    rms_norm,
    rotate_heads_,
)
from blockdraft.models.draft import DraftLayer, DraftModel, RMSNorm
from blockdraft.models.layer_operations import Rotation, is_silu, whole_layer
from blockdraft.models.packed import PackedLinear, can_pack, side_by_side
from blockdraft.models.paged_context import PagedBlocks, PagedContexts


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    eps: float


class _Layer:
    """The products and norms of one draft layer, from its weights of this moment.

    `whole`: the layer in one call, if its products are by kernels.
    """

    def __init__(self, layer: DraftLayer, kernels: Library) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o = PackedLinear(attention.o_proj.weight, attention.o_proj.bias)
        self.gate_up = side_by_side(mlp.gate_proj, mlp.up_proj)
        self.down = PackedLinear(mlp.down_proj.weight)
        self.input_norm = _norm(layer.input_layernorm)
        self.mlp_norm = _norm(layer.post_attention_layernorm)
        query, key = _norm(attention.q_norm), _norm(attention.k_norm)
        self.head_norms = query.weight, key.weight, query.eps
        self.whole = whole_layer(
            kernels,
            (self.qkv, self.o, self.gate_up, self.down),
            (
                (self.input_norm.weight, self.input_norm.eps),
                (self.mlp_norm.weight, self.mlp_norm.eps),
            ),
            self.head_norms,
            query.weight.numel(),
            rounds_first=False,
        )


class KernelDraft:
    """The draft forward of blocks behind contexts in pages; see `kernel_draft`."""

    def __init__(self, model: DraftModel, contexts: PagedContexts, kernels: Library) -> None:
        self._contexts = contexts
        self._kernels = kernels
        self._rotation = model.rotary
        config = model.config
        self._kinds = config.layer_types
        self._heads = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.num_key_value_heads,
        )
        self._layers = [_Layer(layer, kernels) for layer in model.draft_layers()]
        # Behind each layer comes the first norm of the next one, or the last of all.
        self._norms = [*(layer.input_norm for layer in self._layers), _norm(model.norm)]
        # All or none: their products differ in nothing but their weights.
        self._whole = [layer.whole for layer in self._layers if layer.whole is not None]

    def __call__(
        self,
        embeddings: Tensor,
        positions: Tensor,
        keys: Sequence[int],
        lengths: Sequence[int],
        sizes: Sequence[int],
    ) -> Tensor:
        """Embeddings [b, q, D] at positions [b, q] -> hidden states [b, q, D], normed.

        The blocks stand behind the first `lengths` tokens of the sequences `keys`; of each, the
        first `sizes` slots count.
        """
        blocks = self._contexts.blocks(keys, lengths, sizes)
        rotation = self._rotation(positions, embeddings.dtype)
        x = embeddings.reshape(-1, embeddings.shape[-1])
        run = self._run_whole if self._whole else self._run_parts
        return run(x, rotation, blocks).view(embeddings.shape)

    def _run_whole(self, x: Tensor, rotation: Rotation, blocks: PagedBlocks) -> Tensor:
        for index, layer in enumerate(self._whole):
            x = blocks.run_layer(layer, index, self._kinds[index], x, rotation)
        norm = self._norms[-1]
        return rms_norm(self._kernels, x, norm.weight, norm.eps, rounds_first=False)

    def _run_parts(self, x: Tensor, rotation: Rotation, blocks: PagedBlocks) -> Tensor:
        normed = rms_norm(
            self._kernels, x, self._norms[0].weight, self._norms[0].eps, rounds_first=False
        )
        for index, layer in enumerate(self._layers):
            heads = layer.qkv(normed).view(x.shape[0], sum(self._heads), -1)
            rotate_heads_(
                self._kernels, heads, *self._heads[:2], *rotation, layer.head_norms,
                rounds_first=False,
            )  # fmt: skip
            q, k, v = heads.transpose(0, 1).split_with_sizes(self._heads)
            attended = blocks.attend(self._kernels, index, self._kinds[index], q, k, v)
            x, normed = self._add(x, layer.o(attended.flatten(1)), layer.mlp_norm)
            update = layer.down(gated_silu(self._kernels, layer.gate_up(normed)))
            x, normed = self._add(x, update, self._norms[index + 1])
        return normed

    def _add(self, x: Tensor, update: Tensor, norm: _Norm) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""
        return add_rms_norm(self._kernels, update, x, norm.weight, norm.eps, rounds_first=False)


def kernel_draft(model: DraftModel, contexts: PagedContexts) -> KernelDraft | None:
    """The model's block forward by kernels; None if there are none for this type, size or device.

    Uses the weights of this moment.
    """
    weight = model.fc.weight
    kernels = kernels_for_heads(weight.new_empty(model.config.head_dim))
    has_silu = all(is_silu(layer.mlp.activation) for layer in model.draft_layers())
    if kernels is None or not has_silu or not can_pack(weight):
        return None
    with torch.no_grad():
        return KernelDraft(model, contexts, kernels)


def _norm(norm: RMSNorm) -> _Norm:
    return _Norm(norm.weight.detach().contiguous(), norm.eps)
