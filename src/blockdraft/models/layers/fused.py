"""Which decoder layers of a model run in their fused form (`fused_layer`), found by trying.

A layer is replaced only if the fused form gave the same bits in a check. With kernels the
operations between its products are native; they replace torch's only if they then give nearly the
same.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.core.machine import give_back_memory
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.core.remembered import once
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Rotation, Span
from blockdraft.models.attention.plan import AttentionPlan, PlanInForce
from blockdraft.models.layers.common_kinds import common_kinds, kind_of
from blockdraft.models.layers.fused_layer import FusedLayer, RotationSigns, layer_parts
from blockdraft.models.layers.layer import DecoderLayer
from blockdraft.models.layers.packed import (
    can_pack_linear,
    drop_weights,
    is_plain,
    pack_linears,
    plain_linears,
    replace_forward,
)
from blockdraft.models.layers.quantized import QuantizedLinear, dequantize, is_linear
from blockdraft.models.layers.tensors import is_close
from blockdraft.models.supported import decoder_layers

FUSED_KINDS = common_kinds("DecoderLayer")
"""The kinds that `FusedLayer` was written for."""
CONSTANTS_ATTENTION = "blockdraft_constants"
NUM_CHECK_TOKENS = 8
NUM_PRODUCTS = 7
"""Linear layers of such a layer: four of the attention and three of the MLP."""
KERNEL_ERROR = 16
"""Units in the last place of the largest value in a layer's output, by which an output with kernels
may differ from one without. A wrong formula differs by a thousand."""

logger = logging.getLogger(__name__)


def speed_up(
    model: PreTrainedModel, in_force: PlanInForce | None = None, *, keep_weights: bool = True
) -> ExitStack:
    """Let a model compute from packed weights, and fuse the layers that can be fused.

    To be called in evaluation mode. The attention function may change afterwards, to any that is
    registered with transformers' `AttentionInterface` ("eager" is not). Where nothing can be done
    (`can_pack`) the model stays as it is. Fused layers follow the plan that is `in_force`.
    Without `keep_weights` the weights that were copied into them are freed, for good.

    Returns:
        what gives the model back as it was when closed.
    """
    with ExitStack() as undo:
        undo.enter_context(fuse_layers(model, in_force, keep_weights=keep_weights))
        undo.enter_context(pack_linears(set(plain_linears(model)) - replaced_modules(model)))
        return undo.pop_all()


def replaced_modules(model: PreTrainedModel) -> set[nn.Module]:
    """The parts of its fused layers, whose linear layers are not called any more."""
    return {
        module
        for layer in decoder_layers(model)
        if isinstance(vars(layer).get("forward"), FusedLayer)
        for module in layer.modules()
        if module is not layer
    }


def drop_quantized(model: PreTrainedModel) -> None:
    """Free the quantized weights that a model which `speed_up` prepared has packed copies of."""
    unused = replaced_modules(model)
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and (module in unused or "forward" in vars(module)):
            module.quantized = None


@torch.inference_mode()
def fuse_layers(
    model: PreTrainedModel, in_force: PlanInForce | None = None, *, keep_weights: bool = True
) -> ExitStack:
    """Replace the computation of those decoder layers that have a fused form of the same bits.

    One after another: without `keep_weights` no more than one layer is in memory twice.
    """
    signs, in_force = RotationSigns(), in_force or PlanInForce()
    with ExitStack() as undo, _noting_constants(model) as constants:
        for index, layer in enumerate(decoder_layers(model)):
            if not _is_fusible(layer):
                continue
            fused = _fused_if_equal(layer, constants, signs, in_force)
            if fused is None:
                logger.info("layer %d of %s keeps its slower form", index, type(model).__name__)
                continue
            replace_forward(layer, fused, undo)
            _check_whole(fused, layer.self_attn)
            if not keep_weights:
                drop_weights(layer)
                give_back_memory()
        return undo.pop_all()


@contextmanager
def _noting_constants(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Attention that mixes nothing, and notes what it is given beside the tensors."""
    constants: dict[str, Any] = {}

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        constants.clear()
        constants.update(kwargs)
        copies = query.shape[1] // key.shape[1]
        mixed = query * key.repeat_interleave(copies, 1) + value.repeat_interleave(copies, 1)
        return mixed.transpose(1, 2).contiguous(), None

    AttentionInterface.register(CONSTANTS_ATTENTION, attend)
    own = model.config._attn_implementation
    model.set_attn_implementation(CONSTANTS_ATTENTION)
    try:
        yield constants
    finally:
        model.set_attn_implementation(own)


def _is_fusible(layer: nn.Module) -> bool:
    """True for a known kind with plain parts: neither adapters nor hooks would be called.

    Layers in which other packages have replaced the products are not of a known kind.
    """
    parts = [module for module in layer.modules() if module is not layer]
    linears = [module for module in parts if isinstance(module, nn.Linear)]
    return (
        kind_of(layer) in FUSED_KINDS
        and "forward" not in vars(layer)
        and all(is_plain(part) for part in parts)
        and len(linears) == NUM_PRODUCTS
        and all(is_linear(linear) and can_pack_linear(linear) for linear in linears)
    )


def _fused_if_equal(
    layer: Any, constants: dict[str, Any], signs: RotationSigns, in_force: PlanInForce
) -> FusedLayer | None:
    """The fused form of a layer if it gives the same bits; `constants` are noted by its attention.

    The fastest backend computes it, if it computes the same function.
    """
    try:
        hidden, rotation = _check_input(layer.self_attn)
        arguments: dict[str, Any] = {"attention_mask": None, "position_embeddings": rotation}
        layer(hidden, **arguments)  # notes the constants
        fused = FusedLayer(layer, dict(constants), signs, in_force)
        by_reference = fused.layer
        backend = backend_for(hidden.dtype, hidden.device)
        by_backend = DecoderLayer(backend, by_reference.parts)

        def form() -> str:
            with pack_linears(plain_linears(layer)):  # what is compared is the order of operations
                expected = layer(hidden, **arguments)
            fused.layer = by_reference
            if not torch.equal(fused(hidden, **arguments), expected):
                return "its own"
            is_same = _computes_the_same(layer, fused, by_backend, hidden, arguments)
            return "backend" if is_same else "reference"

        found = once("form of a layer", form)
    # What a layer raises that another version of transformers calls or builds differently.
    except (AttributeError, KeyError, TypeError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        logger.info("no fused form of %s: %s", type(layer).__name__, error)
        return None
    if found == "reference":
        logger.info(
            "%s keeps torch's operations: kernels give different results", type(layer).__name__
        )
    fused.layer = by_backend if found == "backend" else by_reference
    return fused if found in ("backend", "reference") else None


def _computes_the_same(
    layer: nn.Module,
    fused: FusedLayer,
    by_backend: DecoderLayer,
    hidden: Tensor,
    arguments: dict[str, Any],
) -> bool:
    """Whether a backend computes what the reference does, but for the last bits.

    A product with whole numbers jumps where the last bit decides how a value rounds. So a quantized
    layer is tried with the plain weights that its own stand for; its products were tried before.
    """
    by_reference = fused.layer
    if any(isinstance(part, QuantizedLinear) for part in layer.modules()):
        plain = copy.deepcopy(layer)
        dequantize(plain)
        parts = layer_parts(plain)
        by_reference = DecoderLayer(by_reference.backend, parts)
        by_backend = DecoderLayer(by_backend.backend, parts)
    outputs = []
    for fused.layer in (by_reference, by_backend):
        outputs.append(fused(hidden, **arguments))
    return is_close(outputs[1], outputs[0], KERNEL_ERROR)


def _check_whole(fused: FusedLayer, attention: Any) -> None:
    """Leave a layer in parts if in one call it has other bits."""
    if fused.layer.whole is None:
        return
    if not once("whole layer right", lambda: _is_whole_right(fused, attention)):
        logger.warning("a whole layer by kernels is wrong on this machine: it runs in parts")
        fused.layer.use_parts()


def _is_whole_right(fused: FusedLayer, attention: Any) -> bool:
    """Whether a layer in one call has the bits of its parts. They run over a page each."""
    layer = fused.layer
    hidden, rotation = _check_input(attention)
    rotation = RotationSigns()(rotation)
    shapes = [(layer.parts.num_heads[1], layer.parts.head_dim)]
    in_parts, found = DecoderLayer(layer.backend, layer.parts), []
    in_parts.use_parts()
    for run in (layer, in_parts):
        kv = PagedKV(shapes, 2, dtype=hidden.dtype, device=hidden.device)
        slots = torch.arange(PAGE_SIZE, PAGE_SIZE + NUM_CHECK_TOKENS)
        spans = [Span(0, NUM_CHECK_TOKENS, 0, NUM_CHECK_TOKENS, [1])]
        plan = AttentionPlan(layer.backend, kv, spans, slots)
        output = run.over_pages(plan, 0, fused.attention, hidden, rotation)
        found.append(torch.cat([output.flatten(), kv.pools[0].flatten()]))
    return torch.equal(*found)


def _check_input(attention: Any) -> tuple[Tensor, Rotation]:
    """Hidden states [1, tokens, hidden] and a rotation: any numbers will do."""
    weight: Tensor = attention.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    hidden, cos, sin = (
        torch.randn(1, NUM_CHECK_TOKENS, width, generator=generator).to(weight.device, weight.dtype)
        for width in (weight.shape[1], attention.head_dim, attention.head_dim)
    )
    return hidden, (cos, sin)
