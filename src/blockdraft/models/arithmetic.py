"""What a row costs, in operations and bytes, from the shapes of the models.

Counted are multiplications and additions of matrix products, two for each pair of numbers that are
multiplied: linear layers, attention, head. Norms, activations and softmax are left out, and so are
rows and keys that only fill a tile or a page up. Bytes are those that must be read and written at
least: all weights once a forward, keys and values of the context once a sequence, what is stored,
and logits. Activations between layers are left out, since they stay in the caches.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.recorder import Work
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.layers.experts import stacked_experts
from blockdraft.models.layers.packed import can_pack
from blockdraft.models.layers.quantized import stored_bytes
from blockdraft.models.supported import decoder_layers, head_dim_of, kv_heads_of, layer_configs

TrainedModel = DraftModel | Eagle3Model
"""Drafters that read features of the target."""
_NUM_USED = ("num_experts_per_tok", "moe_topk", "top_k_experts")
"""How configs call the number of experts that a row runs. Where code of a model's own calls it
otherwise, all count."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Stacked experts: each row runs `num_used` of `num_experts`; bytes are those of one."""

    num_experts: int
    num_used: int
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations and bytes for each unit of Work; see there."""

    row_flops: float = 0.0
    head_row_flops: float = 0.0
    pair_flops: float = 0.0
    forward_bytes: float = 0.0
    row_bytes: float = 0.0
    head_row_bytes: float = 0.0
    key_bytes: float = 0.0
    experts: Experts | None = None

    def flops(self, work: Work) -> float:
        """Floating-point operations."""
        return (
            self.row_flops * work.rows
            + self.head_row_flops * work.head_rows
            + self.pair_flops * work.pairs
        )

    def num_bytes(self, work: Work) -> float:
        """Bytes read and written."""
        return (
            (self.forward_bytes + self._expert_bytes(work)) * work.forwards
            + self.row_bytes * work.rows
            + self.head_row_bytes * work.head_rows
            + self.key_bytes * work.keys
        )

    def _expert_bytes(self, work: Work) -> float:
        """Of the experts that one forward reads: at most those that its rows can reach."""
        if self.experts is None or not work.forwards:
            return 0.0
        reached = self.experts.num_used * work.rows / work.forwards
        return self.experts.num_bytes * min(self.experts.num_experts, reached)


def target_rates(model: PreTrainedModel) -> Rates:
    """A forward of the target, head included.

    Every layer counts as full attention: sliding ones are masked, not skipped.
    """
    config: Any = model.config.get_text_config()
    all_experts = stacked_experts(model)
    of_experts = {part for experts in all_experts for part in experts.modules()}
    dense, stacked = list[tuple[Tensor, int]](), list[tuple[Tensor, int]]()
    for layer in decoder_layers(model):
        for module in layer.modules():
            own = stacked if module in of_experts else dense
            own += [
                (parameter, stored_bytes(module, name, parameter))
                for name, parameter in module.named_parameters(recurse=False)
                if not name.endswith("bias")
            ]
    experts = None
    if stacked:
        num_experts = all_experts[0].num_experts
        num_bytes = sum(num_bytes for _, num_bytes in stacked) / num_experts
        named = (getattr(config, name) for name in _NUM_USED if hasattr(config, name))
        num_used = next(named, num_experts)
        experts = Experts(num_experts, num_used, num_bytes)
    matrices = sum(p.numel() for p, _ in dense if p.ndim == 2)
    used = 0.0 if experts is None else experts.num_used / experts.num_experts
    head_module = model.get_output_embeddings()
    head: Tensor = head_module.weight
    layers = layer_configs(config)
    kv_bytes = 2 * head.itemsize * sum(kv_heads_of(own) * head_dim_of(own) for own in layers)
    return Rates(
        row_flops=2 * (matrices + used * sum(p.numel() for p, _ in stacked)),
        head_row_flops=2 * head.numel(),
        pair_flops=4 * sum(own.num_attention_heads * head_dim_of(own) for own in layers),
        forward_bytes=sum(num_bytes for _, num_bytes in dense)
        + stored_bytes(head_module, "weight", head),
        row_bytes=kv_bytes,
        head_row_bytes=head.shape[0] * head.itemsize,
        key_bytes=kv_bytes,
        experts=experts,
    )


def projection_rates(model: TrainedModel) -> Rates:
    """Features of the target become keys and values in every draft layer."""
    keys_values = _context_weights(model)
    fusion = model.fc.weight
    return Rates(
        row_flops=2 * (_num_fused(model) + sum(weight.numel() for weight in keys_values)),
        forward_bytes=fusion.nbytes + sum(weight.nbytes for weight in keys_values),
        row_bytes=feature_bytes(model) + context_bytes(model),
    )


def draft_rates(model: TrainedModel) -> Rates:
    """A draft forward, without the head. Its own keys and values are not kept.

    An EAGLE-3 drafter also fuses the feature before each anchor, one row a proposal: left out.
    """
    config = model.config
    matrices = [
        p
        for layer in model.draft_layers()
        for name, p in layer.named_parameters()
        if p.ndim == 2 and "_proj_target" not in name  # those of the context
    ]
    per_pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    return Rates(
        row_flops=2 * sum(p.numel() for p in matrices),
        pair_flops=per_pair,
        forward_bytes=sum(p.nbytes for p in matrices),
        key_bytes=context_bytes(model),
    )


def head_rates(num_tokens: int, hidden_size: int, itemsize: int) -> Rates:
    """A head that gives logits of so many tokens."""
    num_weights = num_tokens * hidden_size
    return Rates(
        head_row_flops=2 * num_weights,
        forward_bytes=num_weights * itemsize,
        head_row_bytes=num_tokens * itemsize,
    )


def feature_bytes(model: TrainedModel) -> int:
    """Features of one token."""
    config = model.config
    return config.num_features * config.target_hidden_size * model.fc.weight.itemsize


def context_bytes(model: TrainedModel) -> int:
    """Keys and values of one token of the draft context."""
    config = model.config
    per_layer = 2 * config.num_key_value_heads * config.head_dim
    return config.num_hidden_layers * per_layer * model.fc.weight.itemsize


def weight_bytes(model: nn.Module) -> int:
    """The drafter's own parameters; what it takes from the target is not among them."""
    return sum(parameter.nbytes for parameter in model.parameters())


def packed_bytes(model: TrainedModel) -> int:
    """Second copies of linear layers that a loaded drafter computes from."""
    return sum(
        module.weight.nbytes
        for module in model.modules()
        if isinstance(module, nn.Linear) and can_pack(module.weight)
    )


def copied_bytes(model: DraftModel, num_guessable: int, *, all_guessable: bool) -> int:
    """Second copies of weights that a loaded DFlash drafter computes from.

    Packed linear layers, all context projections side by side, and the rows of the target's head:
    packed, or those of a draft vocabulary.
    """
    head = num_guessable * model.config.hidden_size * model.fc.weight.itemsize
    if all_guessable and not can_pack(model.fc.weight):
        head = 0
    return packed_bytes(model) + sum(w.nbytes for w in _context_weights(model)) + head


def _context_weights(model: TrainedModel) -> list[Tensor]:
    return [
        projection.weight
        for layer in model.draft_layers()
        for projection in layer.self_attn.context_projections
    ]


def _num_fused(model: TrainedModel) -> int:
    """Multiplications that make the layers' contexts of a token's features."""
    if not isinstance(model, DraftModel) or not model.config.fuses_by_layer:
        return model.fc.weight.numel()
    sums = model.config.num_hidden_layers * model.config.context_width
    return sums if model.config.dflare else sums + model.fc.weight.numel()
