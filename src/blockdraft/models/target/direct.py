"""The forward of a model of a common kind, without transformers' code between its layers.

A step of a small model on a CPU spends a quarter of its time there: it reads all weights, so that
nothing of what Python needs stays in the caches. The embedding is the model's own module, and
rotations come from a table that its module fills; the layers run in one call, final norm and head
with them where kernels compute both, and all have the bits that they have one by one.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.kernels.interface import HeadParts, LayerStack
from blockdraft.models.attention.plan import AttentionPlan, kinds_of
from blockdraft.models.attention.visibility import Visibility
from blockdraft.models.layers.common_kinds import common_kinds, kind_of
from blockdraft.models.layers.fused_layer import FusedLayer, with_sign
from blockdraft.models.layers.layer import stack_of
from blockdraft.models.layers.norms import replaced_norm
from blockdraft.models.layers.packed import PackedLinear, is_plain
from blockdraft.models.layers.rotation_table import RotationTable
from blockdraft.models.supported import decoder_layers, rope_types, varies

DIRECT_KINDS = common_kinds("ForCausalLM")
"""Whose forward is embedding, rotation, layers, norm and head, and nothing else."""


@dataclass(frozen=True, slots=True)
class DirectForward:
    """See `direct_forward`."""

    model: Any
    stack: LayerStack
    kinds: Sequence[Visibility]
    feature_places: list[int] | None
    """Where the features are among the outputs that the stack keeps; None if these are they."""
    hooks: Sequence[Sized]
    """What is called before and behind everything that the stack computes."""
    num_own_hooks: int
    """How many of these are the target's own: they capture features, and pack the head's rows."""
    rotations: RotationTable
    head: "_Head | None"
    """What the stack computes behind the layers; None: norm and head are called."""

    def may_run(self) -> bool:
        """Whether nobody else waits for a call that does not happen here."""
        return (
            is_plain(self.model)
            and is_plain(self.model.model)
            and sum(map(len, self.hooks)) == self.num_own_hooks
            and (self.head is None or self.head.is_in(self.model))
        )

    def __call__(
        self, plan: AttentionPlan, inputs: Tensor, wanted: list[int], end: int
    ) -> tuple[Tensor, Tensor]:
        """Inputs [2 or more, rows], token ids and positions -> logits of n rows, and features.

        wanted: [n], the rows. end: behind all positions.

        Returns:
            logits [n, V], and the outputs [rows, num_features * hidden] of the layers asked for.
        """
        base = self.model.model
        hidden = base.embed_tokens(inputs[:1])
        rotation = self.rotations(hidden, inputs[1], end)
        kept, last = plan.run_stack(self.stack, self.kinds, hidden, rotation, wanted)
        logits: Tensor = last if self.head is not None else self.model.lm_head(base.norm(last))
        features = kept if self.feature_places is None else kept[:, self.feature_places]
        return logits[0], features.flatten(1)


@dataclass(frozen=True, slots=True)
class _Head:
    """Final norm and head of a model, and the forwards of theirs that the stack computes."""

    norm: nn.Module
    lm_head: nn.Module
    forwards: tuple[object, object]
    parts: HeadParts

    def is_in(self, model: Any) -> bool:
        """Whether the model still has them."""
        norm, lm_head = model.model.norm, model.lm_head
        forwards = vars(norm).get("forward"), vars(lm_head).get("forward")
        is_own = [own is other for own, other in zip(self.forwards, forwards, strict=True)]
        return norm is self.norm and lm_head is self.lm_head and all(is_own)


def _head_of(model: Any) -> _Head | None:
    """None where either is computed otherwise."""
    norm, lm_head = model.model.norm, model.lm_head
    forward, replaced = vars(lm_head).get("forward"), replaced_norm(norm)
    if replaced is None or not isinstance(forward, PackedLinear):
        return None
    forwards = vars(norm)["forward"], forward
    return _Head(norm, lm_head, forwards, HeadParts(replaced, forward.linear))


def direct_forward(
    model: PreTrainedModel, kv: PagedKV, layer_ids: Sequence[int]
) -> DirectForward | None:
    """The forward of a model whose layers are fused, over its pages; None if it has another form.

    layer_ids: of the outputs that are features.
    """
    if kind_of(model) not in DIRECT_KINDS:
        return None
    layers = list(decoder_layers(model))
    own_forwards = [vars(layer).get("forward") for layer in layers]
    forwards = [forward for forward in own_forwards if isinstance(forward, FusedLayer)]
    if len(forwards) != len(layers) or len(layers) != model.config.num_hidden_layers:
        return None
    kept = sorted({*layer_ids})
    places = None if kept == [*layer_ids] else [kept.index(index) for index in layer_ids]
    attentions = [forward.attention for forward in forwards]
    of_stack = [forward.layer for forward in forwards], attentions, kv, kept
    head = _head_of(model)
    stack = None if head is None else stack_of(*of_stack, head.parts)
    if stack is None:
        head, stack = None, stack_of(*of_stack)
    if stack is None:
        return None
    in_stack = layers if head is None else [*layers, head.norm, head.lm_head]
    hooks = [own for part in in_stack for own in (part._forward_pre_hooks, part._forward_hooks)]
    num_own_hooks = len(kept) + (head is not None)
    asks_always = any(map(varies, rope_types(model.config)))
    rotary = model.model.rotary_emb
    rotations = RotationTable(
        lambda hidden, positions: with_sign(rotary(hidden, position_ids=positions)),
        varies=asks_always,
    )
    kinds, _ = kinds_of(attentions)
    return DirectForward(model, stack, kinds, places, hooks, num_own_hooks, rotations, head)
