"""Targets whose linear layers have weights in groups of whole numbers.

Only weights are rounded, at load; everything else computes in the target's own precision. The
quantized target is a target of its own: drafted output equals its own plain output. Experts that
were stacked become linear layers, one by one.
"""

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.core.config import Quantize
from blockdraft.core.errors import ModelError
from blockdraft.core.machine import give_back_memory
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.torch.groups import GroupLinear
from blockdraft.kernels.weights import GROUP, GroupWeight
from blockdraft.models.layers.experts import APART, EXACT_EXPERTS, WEIGHTS, stacked_experts
from blockdraft.models.layers.rounding import in_groups
from blockdraft.models.supported import decoder_layers, is_quantized

LAYER_BITS: dict[Quantize, int] = {"int8": 8, "int4": 4}
HEAD_BITS = 8
"""Also where layers have four: an error in the head is one in every logit."""
MIN_OUTPUTS = 16
"""Smaller layers are gates and routers: they decide much, and weigh nothing."""

logger = logging.getLogger(__name__)


class QuantizedLinear(nn.Linear):
    """A linear layer with a weight in groups.

    Its `weight` keeps shape and type, for whoever counts, and every number reads as "not a number".
    `quantized` is freed where others compute from a copy of it; see `packed`.
    """

    def __init__(self, quantized: GroupWeight, bias: Tensor | None) -> None:
        super(nn.Linear, self).__init__()  # its own would make a weight first
        self.out_features, self.in_features = quantized.shape
        self.weight = _nothing_like(quantized)
        own = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", own)
        self.quantized: GroupWeight | None = quantized
        self.num_bytes = quantized.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], by the reference."""
        return GroupLinear(self.whole(), self.bias)(x)

    def whole(self) -> GroupWeight:
        """The weight, which must not have been freed."""
        if self.quantized is None:
            raise RuntimeError("the weight was freed: others compute from a copy of it")
        return self.quantized


class QuantizedEmbedding(nn.Embedding):
    """An embedding in groups; as QuantizedLinear."""

    def __init__(self, quantized: GroupWeight, padding_idx: int | None) -> None:
        super(nn.Embedding, self).__init__()
        self.num_embeddings, self.embedding_dim = quantized.shape
        self.padding_idx = padding_idx
        self.weight = _nothing_like(quantized)
        self.quantized = quantized
        self.num_bytes = quantized.num_bytes

    def forward(self, token_ids: Tensor) -> Tensor:
        """[..] -> [.., D]."""
        return look_up(token_ids, self.quantized)


def look_up(token_ids: Tensor, weight: Tensor | GroupWeight) -> Tensor:
    """Rows of an embedding [V, D] for token ids [..]."""
    if isinstance(weight, Tensor):
        return F.embedding(token_ids, weight)
    return weight.at(token_ids).dequantized().to(weight.dtype)


def _nothing_like(weight: GroupWeight) -> nn.Parameter:
    nothing = torch.full((), torch.nan, dtype=weight.dtype, device=weight.device)
    return nn.Parameter(nothing.expand(weight.shape), requires_grad=False)


def is_linear(module: nn.Module) -> bool:
    """True for a linear layer that is nothing more, quantized or not."""
    return type(module) is QuantizedLinear or (
        type(module) is nn.Linear and type(module.weight) is nn.Parameter
    )


def weight_of(module: nn.Linear | nn.Embedding) -> Tensor | GroupWeight:
    """What a layer multiplies with, or looks up."""
    if isinstance(module, QuantizedLinear):
        return module.whole()
    return module.quantized if isinstance(module, QuantizedEmbedding) else module.weight


def stored_bytes(module: nn.Module, name: str, parameter: Tensor) -> int:
    """What a module's parameter of this name takes in memory, and a forward reads of it."""
    if isinstance(module, QuantizedLinear | QuantizedEmbedding) and name == "weight":
        return module.num_bytes
    return parameter.nbytes


def quantize_model(model: PreTrainedModel, quantize: Quantize) -> None:
    """Round the weights of linear layers, experts and head, one after another, for good.

    Embeddings, norms and gates stay, and layers whose inputs are no multiple of GROUP.

    Raises:
        ModelError: there is nothing to round, it is quantized already, or a weight is no number.
    """
    if is_quantized(model):
        raise ModelError(
            f"{type(model).__name__} is quantized already; leave out --quantize, or use the "
            "model's full-precision weights"
        )
    head, num_bits = model.get_output_embeddings(), LAYER_BITS[quantize]
    chosen: dict[nn.Linear, int] = dict.fromkeys(_linears(model), num_bits)
    if head is not None and _is_suitable(head):
        chosen[head] = HEAD_BITS
    experts = [one for one in stacked_experts(model) if _suitable_names(one)]
    if not chosen and not experts:
        raise ModelError(
            f"--quantize {quantize} finds no linear layer in {type(model).__name__} with a "
            f"multiple of {GROUP} inputs; leave it out"
        )
    before = num_bytes(model)
    for linear, own_bits in chosen.items():
        replace_module(model, linear, _rounded(linear.weight, linear.bias, own_bits))
    for one, implementation in [(one, one.config._experts_implementation) for one in experts]:
        _round_experts(one, num_bits, implementation)
    give_back_memory()
    logger.info(
        "%s: weights take %.3g GiB instead of %.3g; %d linear layers are quantized%s, embeddings "
        "and norms are not",
        quantize, num_bytes(model) / 2**30, before / 2**30, len(chosen),
        f", and the experts of {len(experts)} layers" if experts else "",
    )  # fmt: skip
    warn_if_slow(model)


def warn_if_slow(model: PreTrainedModel) -> None:
    """Say so where no kernel reads the packed weights."""
    if not backend_for(model.dtype, model.device).multiplies_groups:
        logger.warning(
            "no kernel for quantized weights runs in %s on %s: every matrix product unpacks them, "
            "slower than without --quantize",
            str(model.dtype).removeprefix("torch."), model.device,
        )  # fmt: skip


def dequantize(model: nn.Module) -> None:
    """Plain layers again, with the rounded weights: what stock transformers can run."""
    for experts in stacked_experts(model):
        _stack_experts(experts)
    for linear in [m for m in model.modules() if isinstance(m, QuantizedLinear)]:
        plain = nn.Linear(linear.in_features, linear.out_features, device="meta")
        weight = linear.whole().dequantized().to(linear.weight.dtype)
        plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        replace_module(model, linear, plain)
    for embedding in [m for m in model.modules() if isinstance(m, QuantizedEmbedding)]:
        weight = embedding.quantized.dequantized().to(embedding.weight.dtype)
        plain_embedding = nn.Embedding(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, device="meta"
        )
        plain_embedding.weight = nn.Parameter(weight, requires_grad=False)
        replace_module(model, embedding, plain_embedding)


def num_bytes(model: nn.Module) -> int:
    """What all parameters take, shared ones once."""
    found = {
        id(parameter): stored_bytes(module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    return sum(found.values())


def replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another."""
    new.train(old.training)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _linears(model: PreTrainedModel) -> list[nn.Linear]:
    return [
        module
        for layer in decoder_layers(model)
        for module in layer.modules()
        if isinstance(module, nn.Linear) and _is_suitable(module)
    ]


def _is_suitable(linear: nn.Module) -> bool:
    return (
        type(linear) is nn.Linear
        and linear.in_features % GROUP == 0
        and linear.out_features >= MIN_OUTPUTS
    )


def _suitable_names(experts: Any) -> list[str]:
    """The stacked weights that can be rounded: not those of experts that no interface computes."""
    if not hasattr(experts, "has_gate"):
        return []
    found = []
    for name in WEIGHTS:
        weight = getattr(experts, name, None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 3:
            outputs, inputs = weight.shape[1:] if not experts.is_transposed else weight.shape[:0:-1]
            if inputs % GROUP == 0 and outputs >= MIN_OUTPUTS:
                found.append(name)
    return found


def _round_experts(experts: Any, num_bits: int, implementation: str) -> None:
    apart: Any = nn.ModuleDict()
    apart.implementation = implementation
    experts.config._experts_implementation = EXACT_EXPERTS  # no other one knows them
    for name in _suitable_names(experts):
        stacked = getattr(experts, name)
        biases = getattr(experts, f"{name}_bias") if experts.has_bias else [None] * len(stacked)
        apart[name] = nn.ModuleList(
            _rounded(weight.T.contiguous() if experts.is_transposed else weight, bias, num_bits)
            for weight, bias in zip(stacked, biases, strict=True)
        )
        delattr(experts, name)
    apart.train(experts.training)
    setattr(experts, APART, apart)


def _stack_experts(experts: Any) -> None:
    """Undo `_round_experts`, but for the rounding."""
    apart = getattr(experts, APART, None)
    if apart is None:
        return
    delattr(experts, APART)
    experts.config._experts_implementation = apart.implementation
    for name, linears in apart.items():
        weights = [linear.whole().dequantized().to(linear.weight.dtype) for linear in linears]
        if experts.is_transposed:
            weights = [weight.T for weight in weights]
        setattr(experts, name, nn.Parameter(torch.stack(weights), requires_grad=False))


def _rounded(weight: Tensor, bias: Tensor | None, num_bits: int) -> QuantizedLinear:
    try:
        return QuantizedLinear(in_groups(weight, num_bits), bias)
    except ValueError as error:
        raise ModelError(f"a weight cannot be quantized: {error}; leave out --quantize") from error
