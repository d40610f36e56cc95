"""Decoder layers of the common kind in fewer and larger operations.

A step of a small model spends as long between its matrix products as in them. A fused layer makes
one product of queries, keys and values, one of gate and up projection, and rotates queries and keys
together. Every rounding stays where the model's own layer has it, and a layer is replaced only if
it gave the same bits on a probe. With kernels the operations between the products are native; they
replace torch's only if they then give nearly the same.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from blockdraft.cache.paged_kv import PagedKV
from blockdraft.cache.pages import PAGE_SIZE
from blockdraft.kernels.cpu.layer import DecoderLayer
from blockdraft.kernels.cpu.ops import kernels_for
from blockdraft.models.attention.paged import Span, TiledPlan, tiled_plan_in_force
from blockdraft.models.layer_operations import (
    KernelOperations,
    LayerLinears,
    LayerOperations,
    Rotation,
)
from blockdraft.models.packed import (
    PackedLinear,
    can_pack,
    is_plain,
    pack_linears,
    plain_linears,
    replace_forward,
    side_by_side,
)
from blockdraft.models.supported import decoder_layers

FUSED_KINDS = frozenset(
    f"transformers.models.{module}.modeling_{module}.{name}DecoderLayer"
    for module, name in (
        ("llama", "Llama"),
        ("mistral", "Mistral"),
        ("qwen2", "Qwen2"),
        ("qwen3", "Qwen3"),
    )
)
"""The kinds that `FusedLayer` was written for. A list, because equal bits on a probe do not show
what another kind does to other numbers."""
PROBE_ATTENTION = "blockdraft_probe"
NUM_PROBE_TOKENS = 8
KERNEL_ERROR = 16
"""Units in the last place of the largest value in a layer's output, by which an output with kernels
may differ from one without. A wrong formula differs by a thousand."""

logger = logging.getLogger(__name__)


class RotationSigns:
    """Moves the sign of the rotated first half into the sine: once a forward, not once a layer."""

    def __init__(self) -> None:
        self._of: Rotation | None = None
        self._signed: Rotation | None = None

    def __call__(self, rotation: Rotation) -> Rotation:
        """cos and signed sin, each [1, tokens, 1, head_dim]."""
        if self._signed is None or rotation is not self._of:
            cos, sin = rotation
            first, second = sin.chunk(2, dim=-1)
            signed = torch.cat((-first, second), dim=-1)
            self._of = rotation
            self._signed = cos.contiguous()[:, :, None], signed[:, :, None]
        return self._signed


class FusedLayer:
    """Calls like a pre-norm decoder layer of transformers with rotated heads and a gated MLP.

    Args:
        layer: the decoder layer; its weights are copied. What happens between its products is in
            `operations`, torch's at first.
        constants: what its attention module gives to the attention function beside the tensors.
        signs: shared by the layers of a model.
    """

    def __init__(self, layer: Any, constants: dict[str, Any], signs: RotationSigns) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.operations = LayerOperations(layer)
        self._attention = attention
        self._constants = constants
        self._signs = signs
        self.linears: LayerLinears = (
            side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            PackedLinear(attention.o_proj.weight, attention.o_proj.bias),
            side_by_side(mlp.gate_proj, mlp.up_proj),
            PackedLinear(mlp.down_proj.weight, mlp.down_proj.bias),
        )
        self.products: Sequence[Callable[[Tensor], Tensor]] = self.linears
        """What is called for them, part by part."""
        self._whole: DecoderLayer | None = None

    def use_kernels(self, operations: KernelOperations) -> None:
        """Compute by kernels what is between the products, or the whole layer where possible."""
        self.operations = operations
        self._whole = operations.whole_layer(self.linears)

    @property
    def runs_whole(self) -> bool:
        """True if a forward over pages runs the layer in one call."""
        return self._whole is not None

    def use_parts(self) -> None:
        """Compute by kernels, part by part."""
        self._whole = None

    def use_torch(self, operations: LayerOperations) -> None:
        """Compute what is between the products by torch."""
        self.operations, self._whole = operations, None

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        position_embeddings: Rotation,
        **kwargs: Any,
    ) -> Tensor:
        """[1, tokens, hidden] -> [1, tokens, hidden], with the arguments of the model's own layer.

        `kwargs` go to the attention function.
        """
        rotation = self._signs(position_embeddings)
        plan = tiled_plan_in_force()
        if self._whole is not None and plan is not None:
            return self.run_whole(plan, self._attention.layer_idx, hidden_states, rotation)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self._attention.layer_idx)
            function = AttentionInterface()[self._attention.config._attn_implementation]
            arguments = self._constants | kwargs
            attended: Tensor = function(self._attention, q, k, v, attention_mask, **arguments)[0]
            return attended

        return self._run(hidden_states, rotation, attend)

    def run_whole(self, plan: TiledPlan, index: int, hidden: Tensor, rotation: Rotation) -> Tensor:
        """The `index`-th layer of the plan's pages in one call, with a signed rotation."""
        assert self._whole is not None
        return plan.run_layer(self._whole, index, hidden, rotation, *self._scale_and_window)

    def run_parts(self, plan: TiledPlan, index: int, hidden: Tensor, rotation: Rotation) -> Tensor:
        """The same part by part."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(index, q[0], k[0], v[0], *self._scale_and_window)[None]

        return self._run(hidden, rotation, attend)

    @property
    def _scale_and_window(self) -> tuple[float, int | None]:
        return self._constants["scaling"], self._constants.get("sliding_window")

    def _run(
        self,
        hidden: Tensor,
        rotation: Rotation,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        operations = self.operations
        qkv_of, o_of, gate_up_of, down_of = self.products
        qkv = qkv_of(operations.norm(hidden))
        heads = qkv.view(*qkv.shape[:-1], sum(operations.num_heads), -1)
        attended = attend(*operations.rotate(heads, rotation))
        hidden, normed = operations.add_and_norm(hidden, o_of(attended.flatten(2)))
        return hidden + down_of(operations.gated(gate_up_of(normed)))


def speed_up(model: PreTrainedModel) -> ExitStack:
    """Let a model on a CPU compute from packed weights, and fuse the layers that can be fused.

    To be called in evaluation mode. The attention function may change afterwards, to any that is
    registered with transformers' `AttentionInterface` ("eager" is not). Where nothing can be done
    (`can_pack`) the model stays as it is.

    Returns:
        what gives the model back as it was when closed.
    """
    with ExitStack() as undo:
        undo.enter_context(fuse_layers(model))
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


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel) -> ExitStack:
    """Replace the computation of those decoder layers that have a fused form of the same bits."""
    signs = RotationSigns()
    with ExitStack() as undo, _probed(model) as constants:
        for index, layer in enumerate(decoder_layers(model)):
            if not _is_fusible(layer):
                continue
            fused = _fused_if_equal(layer, constants, signs)
            if fused is None:
                logger.info("layer %d of %s keeps its slower form", index, type(model).__name__)
                continue
            replace_forward(layer, fused, undo)
            _check_whole(fused, layer.self_attn)
        return undo.pop_all()


@contextmanager
def _probed(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
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

    AttentionInterface.register(PROBE_ATTENTION, attend)
    own = model.config._attn_implementation
    model.set_attn_implementation(PROBE_ATTENTION)
    try:
        yield constants
    finally:
        model.set_attn_implementation(own)


def _is_fusible(layer: nn.Module) -> bool:
    """True for a known kind with plain parts: neither adapters nor hooks would be called."""
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    parts = [module for module in layer.modules() if module is not layer]
    linears = [module for module in parts if isinstance(module, nn.Linear)]
    return (
        kind in FUSED_KINDS
        and "forward" not in vars(layer)
        and all(is_plain(part) for part in parts)
        and all(type(linear) is nn.Linear and can_pack(linear.weight) for linear in linears)
    )


def _fused_if_equal(
    layer: Any, constants: dict[str, Any], signs: RotationSigns
) -> FusedLayer | None:
    """The fused form of a layer if it gives the same bits; `constants` are noted by its attention.

    The layer itself runs with packed weights: what is compared is the order of operations.
    """
    try:
        hidden, rotation = _probe_input(layer.self_attn)
        arguments: dict[str, Any] = {"attention_mask": None, "position_embeddings": rotation}
        with pack_linears(plain_linears(layer)):
            expected = layer(hidden, **arguments)
        fused = FusedLayer(layer, dict(constants), signs)
        same = isinstance(expected, Tensor) and torch.equal(fused(hidden, **arguments), expected)
        if same:
            _use_kernels(fused, layer, expected, lambda: fused(hidden, **arguments))
    # What a layer raises that another version of transformers calls or builds differently.
    except (AttributeError, TypeError, RuntimeError) as error:
        logger.info("no fused form of %s: %s", type(layer).__name__, error)
        return None
    return fused if same else None


def _use_kernels(
    fused: FusedLayer, layer: Any, expected: Tensor, probe: Callable[[], Tensor]
) -> None:
    """Give a fused layer kernels, if there are some and they compute the same function."""
    kernels = kernels_for(expected)
    if kernels is None:
        return
    by_torch = fused.operations
    fused.use_kernels(KernelOperations(layer, kernels))
    error = (probe().float() - expected.float()).abs().max()
    if not error <= KERNEL_ERROR * torch.finfo(expected.dtype).eps * expected.abs().max():
        logger.info("%s keeps torch's operations: kernels give others", type(layer).__name__)
        fused.use_torch(by_torch)


def _check_whole(fused: FusedLayer, attention: Any) -> None:
    """Leave a layer in parts if in one call it has other bits. They run over a page each."""
    kernels = kernels_for(attention.q_proj.weight)
    if not fused.runs_whole or kernels is None:
        return
    hidden, rotation = _probe_input(attention)
    rotation = RotationSigns()(rotation)
    _, kv_heads, _ = fused.operations.num_heads
    found = []
    for run in (fused.run_whole, fused.run_parts):
        kv = PagedKV([(kv_heads, attention.head_dim)], 2, dtype=hidden.dtype, device=hidden.device)
        slots = torch.arange(PAGE_SIZE, PAGE_SIZE + NUM_PROBE_TOKENS)
        plan = TiledPlan(kernels, kv, [Span(0, NUM_PROBE_TOKENS, 0, [1])], slots)
        found.append(torch.cat([run(plan, 0, hidden, rotation).flatten(), kv.pools[0].flatten()]))
    if not torch.equal(*found):
        logger.warning("a whole layer by kernels is wrong on this machine: it runs in parts")
        fused.use_parts()


def _probe_input(attention: Any) -> tuple[Tensor, Rotation]:
    """Hidden states [1, tokens, hidden] and a rotation: any numbers will do."""
    weight: Tensor = attention.q_proj.weight
    generator = torch.Generator().manual_seed(0)
    hidden, cos, sin = (
        torch.randn(1, NUM_PROBE_TOKENS, width, generator=generator).to(weight.dtype)
        for width in (weight.shape[1], attention.head_dim, attention.head_dim)
    )
    return hidden, (cos, sin)
