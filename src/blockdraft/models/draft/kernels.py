"""The forward of a draft block over pages: few and large operations of a backend, for inference.

The same computation as `DraftModel.forward`. Sums are in float32 throughout, so values differ from
it in the last bits; the choice of the target decides what is kept, so output never depends on them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.kernels.interface import Backend, LayerParts, Rotation, Scoring
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention, kinds_of
from blockdraft.models.draft.convolution import DynamicConvolution, Layer, convolve, dynamic_taps
from blockdraft.models.draft.dflash import DraftLayer, DraftModel
from blockdraft.models.draft.modules import layer_parts
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.static_blocks import StaticBlocks, static_blocks
from blockdraft.models.layers.graphs import Graphs
from blockdraft.models.layers.layer import Attend, DecoderLayer, stack_of
from blockdraft.models.layers.packed import side_by_side
from blockdraft.models.layers.rotation_table import RotationTable


class KernelDraft:
    """The draft forward of blocks behind contexts in pages; see `kernel_draft`."""

    def __init__(self, model: DraftModel, contexts: PagedContexts, in_int8: bool) -> None:
        self._contexts = contexts
        self._rotations = RotationTable(
            lambda hidden, positions: model.rotary(positions, hidden.dtype)
        )
        config, scoring = model.config, Scoring(model.config.head_dim**-0.5)
        self._layers = [
            _layer(contexts.backend, own, in_int8=in_int8) for own in model.draft_layers()
        ]
        self._is_convolved = config.dflash2 is not None
        self._attentions = [
            LayerAttention(scoring, config.visibility(kind)) for kind in config.layer_types
        ]
        self._norm = model.norm.parts
        self._stack = stack_of(self._layers, self._attentions, contexts.kv)
        self._kinds, _ = kinds_of(self._attentions)
        self._static: StaticBlocks | None = None

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
        spans, slots = self._contexts.blocks(keys, lengths, sizes)
        end = max(lengths) + positions.shape[1]
        rotation = self._rotations(embeddings, positions.flatten(), end)
        # Rows of all blocks one behind another, unless somebody asks which block a row is of.
        x = embeddings if self._is_convolved else embeddings.reshape(-1, embeddings.shape[-1])
        found = None if self._static is None else self._static(spans, slots, x, rotation)
        if found is None:
            found = self._compute(self._contexts.plan(spans, slots), x, rotation)
        return found.view(embeddings.shape)

    def use_static_shapes(self) -> bool:
        """Run blocks of few rows in fixed shapes, on a card as CUDA graphs, with the same bits.

        Returns:
            False if rows are convolved, or the backend cannot, and nothing changes.
        """
        if not self._is_convolved:
            backend, kv = self._contexts.backend, self._contexts.kv
            self._static = static_blocks(backend, kv, self._compute, kv.pools[0].device)
        return self._static is not None

    @property
    def graphs(self) -> Graphs[Tensor] | None:
        """Of its forwards; None if their shapes are not fixed."""
        return None if self._static is None else self._static.graphs

    def _compute(self, plan: AttentionPlan, x: Tensor, rotation: Rotation) -> Tensor:
        """Hidden states of the rows of a plan, normed, as the embeddings x have them."""
        if self._stack is not None:
            _, x = plan.run_stack(self._stack, self._kinds, x, rotation)
        else:
            for index, layer in enumerate(self._layers):
                x = layer.over_pages(plan, index, self._attentions[index], x, rotation)
        return self._contexts.backend.norm(x, self._norm)


class _Convolved(DecoderLayer):
    """A layer of DFlash 2: of blocks [b, q, D], with convolutions around attention and MLP."""

    def __init__(
        self,
        backend: Backend,
        parts: LayerParts,
        attention_conv: DynamicConvolution,
        mlp_conv: DynamicConvolution,
    ) -> None:
        super().__init__(backend, parts)
        self.use_parts()
        self._around_attention = _PackedConvolution(attention_conv)
        self._around_mlp = _PackedConvolution(mlp_conv)

    def attention(self, normed: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """See DecoderLayer."""
        attention = super().attention
        return self._around_attention(lambda x: attention(x, rotation, attend), normed)

    def mlp(self, normed: Tensor) -> Tensor:
        """See DecoderLayer."""
        return self._around_mlp(super().mlp, normed)


class _PackedConvolution:
    """`DynamicConvolution.around` for blocks [b, q, D]; the layer gets their rows, [b * q, D]."""

    def __init__(self, convolution: DynamicConvolution) -> None:
        self._projection = side_by_side(convolution.kernel_projection)
        self._base_kernel = convolution.base_kernel.detach()
        self._group_size = convolution.group_size

    def __call__(self, layer: Layer, x: Tensor) -> Tensor:
        before, behind = dynamic_taps(self._projection(x), self._base_kernel, self._group_size)
        inner = layer(convolve(x, before).flatten(0, 1))
        return convolve(inner.view(x.shape), behind)


def kernel_draft(
    model: DraftModel, contexts: PagedContexts, *, in_int8: bool = False
) -> KernelDraft | None:
    """The model's block forward over pages; None if its backend does not read pages in place.

    Uses the weights of this moment, or the closest in int8 for the layers' attention and MLP.
    """
    backend = contexts.backend
    is_gated = all(backend.gates(layer.mlp.activation) for layer in model.draft_layers())
    if not (backend.reads_pages and backend.packs and is_gated):
        return None
    with torch.no_grad():
        return KernelDraft(model, contexts, in_int8)


def _layer(backend: Backend, layer: DraftLayer, *, in_int8: bool) -> DecoderLayer:
    parts = layer_parts(
        *(layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm),
        in_int8=in_int8,
    )
    if layer.attention_conv is None or layer.mlp_conv is None:
        return DecoderLayer(backend, parts)
    return _Convolved(backend, parts, layer.attention_conv, layer.mlp_conv)
