"""Fused decoder layers: the bits of the model's own layers, or not used at all."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.backend import NativeBackend
from blockdraft.kernels.cpu.layer import NativeLayer, NativeStack
from blockdraft.kernels.cpu.library import Library, library
from blockdraft.kernels.cpu.onednn import supports_bfloat16
from blockdraft.kernels.cpu.ops import TiledAttention
from blockdraft.kernels.interface import Rotation
from blockdraft.kernels.weights import Norm
from blockdraft.models.attention.exact import EXACT_ATTENTION
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.layers import fused
from blockdraft.models.layers.fused import fuse_layers, speed_up
from blockdraft.models.layers.fused_layer import FusedLayer, RotationSigns
from blockdraft.models.layers.packed import PackedLinear, pack_linears, plain_linears
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from tests.tiny import NUM_LAYERS, VOCAB_SIZE, tiny_target

PACKED_DTYPES = [torch.float32, *([torch.bfloat16] if supports_bfloat16() else [])]
needs_kernels = pytest.mark.skipif(library() is None, reason="no C++ compiler here")
IDS = torch.arange(5, 45)[None]
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "sliding_window": 24,
    "pad_token_id": None,
}


def qwen2() -> PreTrainedModel:
    """Biases, and windows in some layers only."""
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=2, bos_token_id=None)
    )


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_target,
    "llama with biases": lambda: tiny_target(attention_bias=True, mlp_bias=True),
    "qwen3": lambda: tiny_target("qwen3"),
    "qwen2": qwen2,
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name]().to(dtype).eval()


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=IDS, use_cache=False).logits
    return result


def num_replaced(model: PreTrainedModel) -> int:
    return sum("forward" in vars(module) for module in model.modules())


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", [EXACT_ATTENTION, "sdpa"])
def test_a_fused_model_has_the_bits_of_its_own_layers(
    name: str, dtype: torch.dtype, attention: str
) -> None:
    """Also with windows, biases and norms of heads; packed both times, which is another test."""
    model = make(name, dtype)
    model.set_attn_implementation(attention)
    with pack_linears(plain_linears(model)):
        expected = logits_of(model)
    with speed_up(model):
        assert all(isinstance(vars(x)["forward"], FusedLayer) for x in decoder_layers(model))
        assert num_replaced(model) == NUM_LAYERS + 1  # the head
        assert torch.equal(logits_of(model), expected)


def uses_kernels(layer: Any) -> bool:
    return isinstance(vars(layer)["forward"].layer.backend, NativeBackend)


@needs_kernels
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_change_the_last_bits_at_most(name: str, dtype: torch.dtype) -> None:
    model = make(name, dtype)
    with pack_linears(plain_linears(model)):
        expected = logits_of(model)
    with speed_up(model):
        assert all(uses_kernels(layer) for layer in decoder_layers(model))
        error = (logits_of(model) - expected).float().abs().max()
        assert error <= 64 * torch.finfo(dtype).eps * expected.abs().max()


@needs_kernels
def test_kernels_that_compute_something_else_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planted fault: a norm of another kind, with its weights around zero."""

    real = NativeBackend.norm

    def other(backend: NativeBackend, x: Tensor, norm: Norm) -> Tensor:
        return real(backend, x, replace(norm, weight=1.0 + norm.weight))

    model = make("llama")
    with pack_linears(plain_linears(model)):
        expected = logits_of(model)
    monkeypatch.setattr(NativeBackend, "norm", other)
    with caplog.at_level(logging.INFO, logger=fused.__name__), speed_up(model):
        assert not any(uses_kernels(layer) for layer in decoder_layers(model))
        torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=1e-4)
    assert "keeps torch's operations" in caplog.text


def test_closing_gives_the_model_back() -> None:
    model = make("llama")
    expected, names = logits_of(model), list(model.state_dict())
    attention = model.config._attn_implementation
    with speed_up(model):
        assert num_replaced(model) > 0
        assert model.config._attn_implementation == attention
    assert num_replaced(model) == 0
    assert list(model.state_dict()) == names
    assert torch.equal(logits_of(model), expected)


def test_a_target_gives_the_model_back() -> None:
    model = make("llama")
    num_norms = 2 * NUM_LAYERS + 1
    replaces_norms = backend_for(model.dtype, model.device).rule.replaces_norms
    with SequentialTarget(model).released_after():
        # Layers and their activations; the head and the rotation.
        assert num_replaced(model) == 2 * NUM_LAYERS + 2 + replaces_norms * num_norms
    assert num_replaced(model) == 0


def no_signs(signs: RotationSigns, rotation: Rotation) -> Rotation:
    cos, sin = rotation
    return cos[:, :, None], sin[:, :, None]


def test_a_fused_layer_with_other_bits_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planted fault: the rotation lost its signs."""
    model = make("llama")
    with pack_linears(plain_linears(model)):
        expected = logits_of(model)
    monkeypatch.setattr(RotationSigns, "__call__", no_signs)
    with caplog.at_level(logging.INFO, logger=fused.__name__), speed_up(model):
        assert not any("forward" in vars(layer) for layer in decoder_layers(model))
        assert torch.equal(logits_of(model), expected)
    assert "slower form" in caplog.text


def test_the_fault_would_be_seen_if_it_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    with pack_linears(plain_linears(model)):
        expected = logits_of(model)
    with fuse_layers(model):
        monkeypatch.setattr(RotationSigns, "__call__", no_signs)
        assert not torch.equal(logits_of(model), expected)


def test_a_layer_that_another_transformers_builds_differently_keeps_its_form(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make("llama")
    del decoder_layers(model)[1].self_attn.head_dim  # type: ignore[union-attr]
    with caplog.at_level(logging.INFO, logger=fused.__name__), fuse_layers(model):
        assert "forward" not in vars(decoder_layers(model)[1])
        assert num_replaced(model) == NUM_LAYERS - 1
    assert "head_dim" in caplog.text


def test_other_kinds_are_packed_and_not_fused() -> None:
    """Also inside a layer that someone watches."""
    model = tiny_target("gemma3")
    decoder_layers(model)[0].register_forward_hook(lambda *args: None)
    with speed_up(model):
        assert not any("forward" in vars(layer) for layer in decoder_layers(model))
        assert num_replaced(model) == len(plain_linears(tiny_target("gemma3")))


def test_float64_stays_as_it_is() -> None:
    model = make("llama", torch.float64)
    with speed_up(model):
        assert num_replaced(model) == 0


def test_layers_of_another_package_are_not_even_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """BitNet's are no `nn.Linear`, and have packed numbers in the place of a weight."""

    class Packed(nn.Module):
        bias = None

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.whole = linear.weight.detach()
            self.register_buffer("weight", self.whole.sign().to(torch.uint8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.whole)

    def refuse(*args: object) -> None:
        raise AssertionError("a layer was tried")

    model = tiny_target("llama")
    for layer in decoder_layers(model):
        for name, part in layer.named_modules():
            if isinstance(part, nn.Linear):
                layer.set_submodule(name, Packed(part))
    monkeypatch.setattr(fused, "_fused_if_equal", refuse)
    with speed_up(model):
        assert not any("forward" in vars(layer) for layer in decoder_layers(model))


def test_an_adapter_or_a_hook_inside_a_layer_is_still_called() -> None:
    class Adapter(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1.0

    model, called = make("llama"), []
    first, second, *_ = decoder_layers(model)
    adapter = Adapter(64, 64, bias=False)
    adapter.weight = first.self_attn.o_proj.weight
    first.self_attn.o_proj = adapter
    second.mlp.register_forward_hook(lambda *args: called.append(1))
    expected = logits_of(model)
    called.clear()
    with speed_up(model):
        torch.testing.assert_close(logits_of(model), expected)
        assert called == [1]
        assert ["forward" in vars(x) for x in decoder_layers(model)] == [False, False, True, True]


@needs_kernels
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("name", ["norm", "gate"])
def test_the_self_test_finds_a_kernel_that_sees_how_many_rows_there_are(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: a sum over other parts where there are more rows."""
    real = getattr(NativeBackend, name)

    def variant(backend: NativeBackend, x: Tensor, *args: Any) -> Tensor:
        scale = 1.0 + 2 * torch.finfo(dtype).eps * (x.numel() // x.shape[-1] > 8)
        result: Tensor = real(backend, x, *args) * scale
        return result

    with SequentialTarget(make("llama", dtype)).released_after() as target:
        target.check_row_invariance()
        monkeypatch.setattr(NativeBackend, name, variant)
        with pytest.raises(ModelError, match="number of rows"):
            target.check_row_invariance()


@needs_kernels
def test_the_self_test_finds_an_attention_that_sees_how_many_rows_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = TiledAttention.attend

    def variant(plan: TiledAttention, kernels: Library, query: Tensor, *args: Any) -> Tensor:
        result = real(plan, kernels, query, *args)
        return result * (1.0 + 1e-6 * (query.shape[1] > 8))

    for target in (SequentialTarget(make("llama")), PagedTarget(make("llama"), Pages(20))):
        with target.released_after(), monkeypatch.context() as patch:
            target.check_row_invariance()
            if isinstance(target, PagedTarget):
                patch.setattr(target, "_direct", None)
            patch.setattr(AttentionPlan, "run_layer", lambda *_: None)
            patch.setattr(TiledAttention, "attend", variant)
            with pytest.raises(ModelError, match="number of rows"):
                target.check_row_invariance()


def runs_whole(layer: Any) -> bool:
    return vars(layer)["forward"].layer.whole is not None


@needs_kernels
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_whole_layer_has_the_bits_of_its_parts(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone or all layers in one call, for any rows, and of the sequential path's parts too."""
    ids = IDS[0].tolist()
    with SequentialTarget(make(name, dtype)).released_after() as sequential:
        expected = sequential.logits_of_split(ids, (len(ids),))
    with PagedTarget(make(name, dtype), Pages(20)).released_after() as target:
        if not all(runs_whole(layer) for layer in target.layers):
            pytest.skip("no products by kernels on this CPU")
        for split in ((len(ids),), (1,) * len(ids), (7, 1, 16, 1, 5, 10)):
            assert torch.equal(target.logits_of_split(ids, split), expected), split
        monkeypatch.setattr(target, "_direct", None)
        assert torch.equal(target.logits_of_split(ids, (len(ids),)), expected)
        monkeypatch.setattr(AttentionPlan, "run_layer", lambda *_: None)
        assert torch.equal(target.logits_of_split(ids, (len(ids),)), expected)


@needs_kernels
@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_over_pages_in_int8_too(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = IDS[0].tolist()
    with PagedTarget(make(name, dtype), Pages(20), kv_in_int8=True).released_after() as target:
        if target._direct is None:
            pytest.skip("no products by kernels on this CPU")
        expected = target.logits_of_split(ids, (len(ids),))
        assert torch.equal(target.logits_of_split(ids, (1,) * len(ids)), expected)
        monkeypatch.setattr(target, "_direct", None)
        assert torch.equal(target.logits_of_split(ids, (7, len(ids) - 7)), expected)
        monkeypatch.setattr(AttentionPlan, "run_layer", lambda *_: None)
        assert torch.equal(target.logits_of_split(ids, (len(ids),)), expected)


@needs_kernels
def test_a_whole_layer_with_other_bits_runs_in_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planted fault: scores are scaled twice."""
    real = NativeLayer.__call__

    def faulty(layer: NativeLayer, *args: Any) -> Tensor:
        *rest, scoring, scales = args
        return real(layer, *rest, replace(scoring, scale=2 * scoring.scale), scales)

    model = make("llama")
    with speed_up(model):
        if not runs_whole(decoder_layers(model)[0]):
            pytest.skip("no products by kernels on this CPU")
    monkeypatch.setattr(NativeLayer, "__call__", faulty)
    with speed_up(model):
        assert not any(runs_whole(layer) for layer in decoder_layers(model))
        assert all(uses_kernels(layer) for layer in decoder_layers(model))
    assert "runs in parts" in caplog.text


@needs_kernels
@pytest.mark.parametrize("kind", [NativeLayer, NativeStack])
def test_the_self_test_finds_a_whole_layer_that_sees_how_many_rows_there_are(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kind.__call__

    def variant(layers: Any, hidden: Tensor, *args: Any) -> Any:
        factor = 1.0 + 1e-6 * (hidden.shape[1] > 8)
        result = real(layers, hidden, *args)
        if kind is NativeLayer:
            return result * factor
        kept, last = result
        return kept, last * factor

    with PagedTarget(make("llama"), Pages(20)).released_after() as target:
        if not all(runs_whole(layer) for layer in target.layers):
            pytest.skip("no products by kernels on this CPU")
        if kind is NativeLayer:
            monkeypatch.setattr(target, "_direct", None)
        target.check_row_invariance()
        monkeypatch.setattr(kind, "__call__", variant)
        with pytest.raises(ModelError, match="number of rows"):
            target.check_row_invariance()


@pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)
def test_the_check_fails_if_a_packed_product_depends_on_its_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: the last bit of a row moves with the number of rows."""
    model, call = make("llama", dtype), PackedLinear.__call__

    def variant(linear: PackedLinear, x: Tensor) -> Tensor:
        scale = 1.0 + 2 * torch.finfo(dtype).eps * (x.numel() // x.shape[-1] > 8)
        return call(linear, x) * scale

    with SequentialTarget(model).released_after() as target:
        target.check_row_invariance()
        monkeypatch.setattr(PackedLinear, "__call__", variant)
        with pytest.raises(ModelError, match="number of rows"):
            target.check_row_invariance()
