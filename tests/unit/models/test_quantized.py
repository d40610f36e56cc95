"""Targets with quantized weights: what is rounded and how well, and that nothing else stays."""

import importlib.util
import logging
import re
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers import Step3p7Config, Step3p7ForConditionalGeneration

from blockdraft.cache.pages import Pages
from blockdraft.cli.output import describe_llm
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.engine.start_key import remembered_path, start_key
from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.cpu.products import GroupProduct
from blockdraft.kernels.weights import GROUP
from blockdraft.measure.identity import describe_setting
from blockdraft.models.arithmetic import target_rates
from blockdraft.models.layers.fused import drop_quantized
from blockdraft.models.layers.fused_layer import FusedLayer
from blockdraft.models.layers.quantized import (
    QuantizedLinear,
    dequantize,
    num_bytes,
    quantize_model,
)
from blockdraft.models.layers.rounding import in_groups
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import load_target_model
from blockdraft.models.target.paged import PagedTarget
from blockdraft.models.target.sequential import SequentialTarget
from blockdraft.models.target.stock import StockModel
from tests.small_llm import assert_nothing_left, load_llm, params
from tests.tensors import draw
from tests.tiny import (
    TINY_SIZES,
    VOCAB_SIZE,
    edit_json,
    randomize,
    tiny_target,
    tiny_target_folder,
)


def error_of(weight: Tensor, num_bits: int) -> float:
    """The squared error as a share of the weight's own squares."""
    rounded = in_groups(weight, num_bits).dequantized()
    return float((rounded - weight).square().sum() / weight.square().sum())


def test_rounding_is_close() -> None:
    weight = draw(64, 256)
    assert error_of(weight, 8) < 5e-5
    # From the smallest to the largest value in even steps it is 0.0061.
    assert error_of(weight, 4) < 0.0051
    assert error_of(weight + 3.0, 4) < 0.0006


def test_what_four_bits_can_hold_is_held() -> None:
    numbers = torch.randint(0, 16, (8, 4, GROUP), generator=torch.Generator().manual_seed(1))
    numbers[..., :2] = torch.tensor([0, 15])
    scales, minimums = draw(8, 4, 1, seed=2).abs().half(), draw(8, 4, 1, seed=3).half()
    weight = (numbers * scales.float() + minimums.float()).flatten(1)
    found = in_groups(weight, 4).dequantized()
    assert (found - weight).abs().max() < 2e-3 * weight.abs().max()


@pytest.mark.parametrize("num_bits", [4, 8])
def test_groups_of_equal_values_and_of_zeros(num_bits: int) -> None:
    weight = draw(4, 96)
    weight[0], weight[1, :GROUP], weight[2] = 0.0, 0.5, -0.25
    found = in_groups(weight, num_bits).dequantized()
    assert (found[0] == 0.0).all()
    torch.testing.assert_close(found[1:3], weight[1:3], atol=0.15, rtol=0)
    torch.testing.assert_close(found[2], weight[2], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 1e8])
def test_values_that_have_no_scale_are_refused(broken: float) -> None:
    weight = draw(4, 64)
    weight[2, 40] = broken
    for num_bits in (4, 8):
        with pytest.raises(ValueError, match="not a number, or too large"):
            in_groups(weight, num_bits)


def test_other_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="40 inputs are not a multiple of 32"):
        in_groups(draw(4, 40), 4)


@pytest.mark.parametrize(("quantize", "bits"), [("int4", 4), ("int8", 8)])
def test_layers_and_head_are_rounded_and_the_rest_stays(quantize, bits, caplog) -> None:
    """The originals are freed."""
    model = tiny_target(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    layers = [layer.mlp.down_proj for layer in model.model.layers]
    originals = [weakref.ref(linear.weight) for linear in layers]
    del layers
    before = num_bytes(model)
    with caplog.at_level(logging.INFO, logger="blockdraft"):
        quantize_model(model, quantize)
    assert all(original() is None for original in originals)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert {type(linear) for linear in linears} == {QuantizedLinear}
    assert {linear.whole().num_bits for linear in linears[:-1]} == {bits}
    head = model.get_output_embeddings()
    assert (head.whole().num_bits, head.whole().minimums) == (8, None)
    assert model.get_input_embeddings().weight is embedding
    assert all(linear.weight.isnan().all() for linear in linears)
    assert all(linear.weight.untyped_storage().nbytes() == 4 for linear in linears)
    assert num_bytes(model) < 0.45 * before
    assert f"{quantize}: weights take" in caplog.text
    assert "29 linear layers are quantized" in caplog.text


def test_gates_and_odd_widths_stay() -> None:
    model = tiny_target("qwen3_moe", intermediate_size=96, moe_intermediate_size=48)
    model.model.layers[0].mlp.gate2 = nn.Linear(64, 1)
    model.model.layers[0].mlp.odd = nn.Linear(48, 64)
    quantize_model(model, "int4")
    assert type(model.model.layers[0].mlp.gate2) is nn.Linear
    assert type(model.model.layers[0].mlp.odd) is nn.Linear
    assert type(model.model.layers[0].self_attn.q_proj) is QuantizedLinear


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize(("quantize", "bits"), [("int4", 4), ("int8", 8)])
def test_experts_are_rounded_one_by_one(kind, quantize, bits) -> None:
    """And stand for the rounded weights of each, in the layout of the model."""
    model = tiny_target(kind, moe_intermediate_size=64)
    own = model.config._experts_implementation
    experts = [layer.mlp.experts for layer in model.model.layers]
    weights = [(one.gate_up_proj.clone(), one.down_proj.clone()) for one in experts]
    before = num_bytes(model)
    quantize_model(model, quantize)
    assert num_bytes(model) < 0.45 * before
    for one, both in zip(experts, weights, strict=True):
        assert not any(parameter.ndim == 3 for parameter in one.parameters())
        for name, weight in zip(("gate_up_proj", "down_proj"), both, strict=True):
            linears = one.blockdraft_apart[name]
            assert len(linears) == one.num_experts == 8
            for linear, plain in zip(linears, weight, strict=True):
                assert linear.whole().num_bits == bits
                plain = plain.T if kind == "gpt_oss" else plain
                expected = in_groups(plain.contiguous(), bits).dequantized()
                assert torch.equal(linear.whole().dequantized(), expected)
    ids = torch.arange(20)[None]
    found = model(ids).logits
    dequantize(model)
    assert model.config._experts_implementation == own
    assert experts[0].gate_up_proj.shape == weights[0][0].shape
    expected = model(ids).logits
    assert 0 < (found - expected).abs().max() < 2e-3 * expected.abs().max()


def test_experts_of_odd_widths_are_rounded_where_they_can_be() -> None:
    model = tiny_target("qwen3_moe", moe_intermediate_size=48)
    quantize_model(model, "int8")
    experts = model.model.layers[0].mlp.experts
    assert [*experts.blockdraft_apart] == ["gate_up_proj"]
    assert experts.down_proj.ndim == 3
    with PagedTarget(model, Pages(9)).released_after() as target:
        target.check_row_invariance()


def test_experts_that_ask_no_interface_stay_as_they_are() -> None:
    """Those of Step 3.7 compute themselves, from stacked weights."""
    text = {
        **TINY_SIZES,
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 0,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "share_expert_dim": 64,
        "mlp_layer_types": ["dense", "sparse"] * 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    torch.manual_seed(0)
    model = Step3p7ForConditionalGeneration(Step3p7Config(text_config=text, vision_config=vision))
    randomize(model.eval())
    quantize_model(model, "int8")
    assert type(decoder_layers(model)[1].self_attn.q_proj) is QuantizedLinear
    ids = torch.arange(40)[None]
    expected = model(ids).logits[0].detach()
    with PagedTarget(model, Pages(9), exact=False).released_after() as target:
        found = target.logits_of_split(ids[0].tolist(), (33, 7))
    # Inputs are rounded to whole numbers: another last bit before may be another number there.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_packed_experts_hold_one_copy() -> None:
    if not backend_for(torch.float32, "cpu").multiplies_groups:
        pytest.skip("no products with groups by kernels on this machine")
    model = tiny_target("qwen3_moe", moe_intermediate_size=64)
    quantize_model(model, "int4")
    target = PagedTarget(model, Pages(9))
    linear = model.model.layers[0].mlp.experts.blockdraft_apart["down_proj"][3]
    assert isinstance(vars(linear)["forward"].linear, GroupProduct)
    drop_quantized(model)
    assert linear.quantized is None
    target.check_row_invariance()


def test_what_cannot_be_quantized_is_refused() -> None:
    model = tiny_target()
    model.config.quantization_config = {"quant_method": "awq"}
    with pytest.raises(ModelError, match="LlamaForCausalLM is quantized already"):
        quantize_model(model, "int4")
    model = tiny_target(hidden_size=48, intermediate_size=80, head_dim=12)
    with pytest.raises(ModelError, match="no linear layer in LlamaForCausalLM with a multiple"):
        quantize_model(model, "int8")
    model = tiny_target()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ModelError, match="a weight cannot be quantized: a value is not a number"):
        quantize_model(model, "int4")


def test_a_machine_without_kernels_is_told_so(without_kernels, caplog) -> None:
    quantize_model(tiny_target(), "int8")
    assert "every matrix product unpacks them, slower than without --quantize" in caplog.text


def test_it_computes_what_its_weights_stand_for() -> None:
    model, ids = tiny_target(), torch.arange(20)[None]
    exact = model(ids).logits
    quantize_model(model, "int8")
    found = model(ids).logits
    dequantize(model)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())
    expected = model(ids).logits
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    assert 0 < (found - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("way", ["paged", "sequential"])
def test_layers_are_fused_and_hold_one_copy(way: str) -> None:
    if not backend_for(torch.float32, "cpu").multiplies_groups:
        pytest.skip("no products with groups by kernels on this machine")
    model = tiny_target()
    quantize_model(model, "int4")
    target = SequentialTarget(model) if way == "sequential" else PagedTarget(model, Pages(9))
    layer = vars(target.layers[1])["forward"]
    assert isinstance(layer, FusedLayer)
    assert isinstance(layer.layer.parts.gate_up, GroupProduct)
    assert layer.layer.whole is not None
    assert target.rule.row_multiple == 1
    drop_quantized(model)
    assert all(m.quantized is None for m in model.modules() if isinstance(m, QuantizedLinear))
    target.check_row_invariance()


def test_bytes_of_a_forward_are_those_that_are_read() -> None:
    model = tiny_target()
    before = target_rates(model).forward_bytes
    quantize_model(model, "int4")
    after = target_rates(model)
    assert 0.15 * before < after.forward_bytes < 0.25 * before
    assert after.row_flops == target_rates(tiny_target()).row_flops


def test_the_drafter_shares_the_quantized_head(folders) -> None:
    """And no layer keeps a second copy of its weight."""
    llm = load_llm(folders, quantize="int4")
    if not backend_for(torch.float32, "cpu").multiplies_groups:
        pytest.skip("no products with groups by kernels on this machine")
    model = llm.engine.target.model
    head = vars(model.get_output_embeddings())["forward"]
    assert isinstance(head.linear, GroupProduct)
    assert llm.engine.drafter._head is head
    assert all(m.quantized is None for m in model.modules() if isinstance(m, QuantizedLinear))
    generation = llm.generate("the abc", params())
    assert generation.completions[0].acceptance.num_drafted > 0


@pytest.mark.parametrize(
    ("method", "package", "changes"),
    [
        ("awq", "gptqmodel", {"bits": 4, "group_size": 32}),
        ("gptq", "optimum", {"bits": 4, "group_size": 32}),
        ("compressed-tensors", "compressed_tensors", {"format": "pack-quantized"}),
        ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
    ],
)
def test_a_missing_package_is_named_at_load(method, package, changes, tmp_path) -> None:
    """In one line, with what to install and what to do without."""
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    folder = tiny_target_folder(tmp_path)
    config = {"quant_method": method, "config_groups": {}, **changes}
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(ModelError) as found:
        load_target_model(folder, torch.float32)
    message = str(found.value)
    assert f"is quantized by {method}, and this installation cannot load it" in message
    assert re.search(rf"pip install (-U )?{package.replace('_', '-')}", message)
    assert message.endswith("or give the model's full-precision weights with --quantize")
    assert "\n" not in message


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="it must be one of int8, int4 or unset"):
        LLMConfig(quantize="int2")  # type: ignore[arg-type]


def test_what_is_known_of_a_run_says_how_weights_are_rounded(folders) -> None:
    """The same models with another option are others: for remembered checks and reports."""
    llm = load_llm(folders, quantize="int8")
    assert describe_setting(llm)["config"]["quantize"] == "int8"
    assert describe_llm(llm)["quantize"] == "int8"
    keys = [
        start_key(replace(llm.config, quantize=quantize), *folders, torch.float32, "cpu")
        for quantize in (None, "int8", "int4")
    ]
    assert len({remembered_path(key) for key in keys}) == 3


def test_stock_transformers_runs_the_rounded_weights(folders) -> None:
    """What `prove` compares with is the same target."""
    llm = load_llm(folders, quantize="int8", num_draft_tokens=0)
    asked = params(max_tokens=8)
    prompt = llm.tokenizer.encode("the abc the abc")
    stock = StockModel(folders[0], torch.float32, "cpu", llm.tokenizer.eos_ids, "int8")
    expected = stock.generate(prompt, asked)
    assert llm.generate(prompt, asked).completions[0].token_ids == expected


@pytest.mark.parametrize("asked", [{}, {"temperature": 0.7, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": 20}], ids=["chains", "trees"])
def test_drafts_change_no_answer_of_a_quantized_target(folders, options, asked) -> None:
    prompts = ["the abc the abc the abc", "a b c d e f g a b c", "xyz"]
    llm = load_llm(folders, quantize="int4", **options)
    drafted = [one.completions[0] for one in llm.generate(prompts, params(**asked))]
    for prompt, own in zip(prompts, drafted, strict=True):
        expected = llm.generate(prompt, params(num_draft_tokens=0, **asked)).completions[0]
        assert own.token_ids == expected.token_ids
        assert own.acceptance.num_drafted > 0
    assert llm.engine.proposer.failures.num_failures == 0
    assert_nothing_left(llm)
