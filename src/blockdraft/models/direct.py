"""The forward of a model of a common kind, without transformers' code between its layers.

A step of a small model on a CPU spends a quarter of its time there: it reads all weights, so that
nothing of what Python needs stays in the caches. Embedding, rotation, final norm and head are the
model's own modules; the layers run in one call, with the bits that they have one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import LayerStack
from blockdraft.models.attention.plan import AttentionPlan, LayerAttention
from blockdraft.models.fused import FusedLayer, with_sign
from blockdraft.models.layer import stack_of
from blockdraft.models.packed import is_plain
from blockdraft.models.supported import decoder_layers

DIRECT_KINDS = frozenset(
    f"transformers.models.{module}.modeling_{module}.{name}ForCausalLM"
    for module, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
)
"""Whose forward is embedding, rotation, layers, norm and head, and nothing else."""


@dataclass(frozen=True, slots=True)
class DirectForward:
    """See `direct_forward`."""

    model: Any
    layers: Sequence[nn.Module]
    stack: LayerStack
    attentions: Sequence[LayerAttention]
    kept: Sequence[int]
    num_hooks: Sequence[int]
    """Of each layer the target's own hooks, which capture features."""

    def may_run(self) -> bool:
        """Whether nobody else waits for a call that does not happen here."""
        if not (is_plain(self.model) and is_plain(self.model.model)):
            return False
        return not any(
            layer._forward_pre_hooks or len(layer._forward_hooks) > num
            for layer, num in zip(self.layers, self.num_hooks, strict=True)
        )

    def __call__(
        self, plan: AttentionPlan, token_ids: Tensor, positions: Tensor, wanted: Tensor
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Token ids and positions [1, rows] -> logits of the rows `wanted` [n], and features.

        Returns:
            logits [n, V], and the outputs [1, rows, hidden] of the last layer and of `kept`.
        """
        base = self.model.model
        hidden = base.embed_tokens(token_ids)
        rotation = with_sign(base.rotary_emb(hidden, position_ids=positions))
        states = plan.run_stack(self.stack, self.attentions, hidden, rotation)
        logits: Tensor = self.model.lm_head(base.norm(states[0])[:, wanted])
        return logits[0], dict(zip((len(self.attentions) - 1, *self.kept), states, strict=True))


def direct_forward(
    model: PreTrainedModel, kv: PagedKV, layer_ids: Sequence[int]
) -> DirectForward | None:
    """The forward of a model whose layers are fused, over its pages; None if it has another form.

    layer_ids: of the outputs that are features.
    """
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind not in DIRECT_KINDS:
        return None
    layers = list(decoder_layers(model))
    own_forwards = [vars(layer).get("forward") for layer in layers]
    forwards = [forward for forward in own_forwards if isinstance(forward, FusedLayer)]
    if len(forwards) != len(layers) or len(layers) != model.config.num_hidden_layers:
        return None
    kept = sorted({*layer_ids} - {len(layers) - 1})
    attentions = [forward.attention for forward in forwards]
    stack = stack_of([forward.layer for forward in forwards], attentions, kv, kept)
    if stack is None:
        return None
    num_hooks = [int(index in layer_ids) for index in range(len(layers))]
    return DirectForward(model, layers, stack, attentions, kept, num_hooks)
