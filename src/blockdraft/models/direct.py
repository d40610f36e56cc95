"""The forward of a model of a common kind, without transformers' code between its layers.

A step of a small model on a CPU spends a quarter of its time there: it reads all weights, so that
nothing of what Python needs stays in the caches. Embedding, final norm and head are the model's own
modules, and rotations come from a table that its module fills; the layers run in one call, with the
bits that they have one by one.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import LayerStack
from blockdraft.models.attention.plan import AttentionPlan, kinds_of
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.fused import FusedLayer, with_sign
from blockdraft.models.layer import stack_of
from blockdraft.models.packed import is_plain
from blockdraft.models.rotation_table import RotationTable
from blockdraft.models.supported import decoder_layers, rope_types, varies

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
    stack: LayerStack
    kinds: Sequence[Visibility]
    feature_places: list[int] | None
    """Where the features are among the outputs that the stack keeps; None if these are they."""
    hooks: Sequence[tuple[Sized, Sized, int]]
    """Of each layer what is called before and behind it, and how many of these the target's own
    are, which capture features."""
    rotations: RotationTable

    def may_run(self) -> bool:
        """Whether nobody else waits for a call that does not happen here."""
        if not (is_plain(self.model) and is_plain(self.model.model)):
            return False
        return not any(before or len(behind) > num for before, behind, num in self.hooks)

    def __call__(
        self, plan: AttentionPlan, inputs: Tensor, wanted: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Inputs [2 or more, rows], token ids and positions -> logits of n rows, and features.

        wanted: [n], the rows.

        Returns:
            logits [n, V], and the outputs [rows, num_features * hidden] of the layers asked for.
        """
        base = self.model.model
        hidden = base.embed_tokens(inputs[:1])
        rotation = self.rotations(hidden, inputs[1], int(inputs[1].max()) + 1)
        kept, last = plan.run_stack(self.stack, self.kinds, hidden, rotation, wanted)
        logits: Tensor = self.model.lm_head(base.norm(last))
        features = kept if self.feature_places is None else kept[:, self.feature_places]
        return logits[0], features.flatten(1)


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
    kept = sorted({*layer_ids})
    places = None if kept == [*layer_ids] else [kept.index(index) for index in layer_ids]
    attentions = [forward.attention for forward in forwards]
    stack = stack_of([forward.layer for forward in forwards], attentions, kv, kept)
    if stack is None:
        return None
    hooks = [
        (layer._forward_pre_hooks, layer._forward_hooks, int(index in layer_ids))
        for index, layer in enumerate(layers)
    ]
    asks_always = any(map(varies, rope_types(model.config)))
    rotary = model.model.rotary_emb
    rotations = RotationTable(
        lambda hidden, positions: with_sign(rotary(hidden, position_ids=positions)),
        varies=asks_always,
    )
    kinds, _ = kinds_of(attentions)
    return DirectForward(model, stack, kinds, places, hooks, rotations)
