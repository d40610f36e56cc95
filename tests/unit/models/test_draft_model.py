from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from blockdraft.core.errors import ModelError
from blockdraft.models.draft.config import DraftConfig
from blockdraft.models.draft.context import ConcatContext
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.modules import RMSNorm, Rotary
from blockdraft.models.layers.tensors import with_fresh_strides

FULL = ("full_attention",) * 2
MIXED = ("sliding_attention", "full_attention")


def make_config(**changes: Any) -> DraftConfig:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 97,
        "num_target_layers": 12,
        "target_hidden_size": 64,
        "target_layer_ids": (1, 5, 9),
        "mask_token_id": 96,
        "block_size": 8,
        "layer_types": FULL,
    }
    return DraftConfig(**(values | changes))


def make_model(**changes: Any) -> DraftModel:
    """A model whose projections and norms are far enough from zero and one to matter."""
    model = DraftModel(make_config(**changes)).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return model


def make_inputs(model: DraftModel, num_context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [1, c, inputs] and block embeddings [1, block, D], one row for all mask slots."""
    generator = torch.Generator().manual_seed(2)
    config = model.config
    features = torch.randn(1, num_context, model.fc.in_features, generator=generator)
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    token_ids = torch.tensor([[5] + [config.mask_token_id] * (config.block_size - 1)])
    return features, model.embed(token_ids, weight)


def run(model: DraftModel, features: torch.Tensor, embeddings: torch.Tensor, offset: int = 0):
    """Hidden states after a fresh context of all features."""
    num_context, num_slots = features.shape[1], embeddings.shape[1]
    positions = torch.arange(offset, offset + num_context + num_slots)[None]
    context = ConcatContext(model.project_context(features, positions[:, :num_context]))
    masks = model.block_masks(num_context, num_slots)
    return model(embeddings, positions[:, num_context:], context, masks)


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


def test_parameters_have_the_published_names_and_shapes():
    model = DraftModel(make_config(num_hidden_layers=5, layer_types=("full_attention",) * 5))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    expected = {"fc.weight": (64, 192), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for i in range(5):
        expected |= {
            f"layers.{i}.input_layernorm.weight": (64,),
            f"layers.{i}.post_attention_layernorm.weight": (64,),
            f"layers.{i}.self_attn.q_proj.weight": (64, 64),
            f"layers.{i}.self_attn.k_proj.weight": (32, 64),
            f"layers.{i}.self_attn.v_proj.weight": (32, 64),
            f"layers.{i}.self_attn.o_proj.weight": (64, 64),
            f"layers.{i}.self_attn.q_norm.weight": (16,),
            f"layers.{i}.self_attn.k_norm.weight": (16,),
            f"layers.{i}.mlp.gate_proj.weight": (96, 64),
            f"layers.{i}.mlp.up_proj.weight": (96, 64),
            f"layers.{i}.mlp.down_proj.weight": (64, 96),
        }
    assert shapes == expected
    assert len(shapes) == 58


def test_attention_bias_adds_four_biases_a_layer():
    names = DraftModel(make_config(attention_bias=True)).state_dict().keys()
    assert sum(name.endswith(".bias") for name in names) == 2 * 4


def test_features_of_another_width_than_the_drafter():
    model = make_model(target_hidden_size=48, target_layer_ids=(1, 2, 3, 4))
    assert model.fc.in_features == 192
    features, embeddings = make_inputs(model, 5)
    assert run(model, features, embeddings).shape == (1, 8, 64)


@pytest.mark.parametrize("layer_types", [FULL, MIXED])
@torch.inference_mode()
def test_growing_context_equals_a_fresh_one(layer_types):
    model = make_model(layer_types=layer_types, sliding_window=5)
    features, embeddings = make_inputs(model, 60)
    context = model.new_context(capacity=3)
    for num_new in (1, 8, 3, 1, 20, 2, 25):
        end = len(context) + num_new
        new = slice(len(context), end)
        context.append(model.project_context(features[:, new], torch.arange(60)[None, new]))
        positions = torch.arange(end, end + 8)[None]
        hidden = model(embeddings, positions, context, model.block_masks(end, 8))
        assert close(hidden, run(model, features[:, :end], embeddings))
        assert len(context) == context.num_context == end


@torch.inference_mode()
def test_a_feature_reaches_the_block_only_once_it_is_context():
    model = make_model()
    features, embeddings = make_inputs(model, 11)
    start, reference = 10, run(model, features[:, :10], embeddings)
    for position, matters in ((start, False), (start - 1, True), (0, True)):
        changed = features.clone()
        changed[:, position] += 1.0
        hidden = run(model, changed[:, :start], embeddings)
        assert close(hidden, reference) is not matters


@torch.inference_mode()
def test_only_positions_tell_mask_slots_apart():
    model = make_model()
    features, embeddings = make_inputs(model, 10)
    context = ConcatContext(model.project_context(features, torch.arange(10)[None]))
    masks = model.block_masks(10, 8)
    same = model(embeddings, torch.full((1, 8), 10), context, masks)[0, 1:]
    assert close(same, same[:1].expand_as(same))
    real = run(model, features, embeddings)[0, 1:]
    assert all(not close(real[i], real[i + 1], 1e-3) for i in range(6))


@pytest.mark.parametrize("layer_types", [FULL, MIXED])
@torch.inference_mode()
def test_shifting_all_positions_changes_nothing(layer_types):
    model = make_model(layer_types=layer_types, sliding_window=5)
    features, embeddings = make_inputs(model, 10)
    reference = run(model, features, embeddings)
    assert close(run(model, features, embeddings, offset=37), reference, 1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 5e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.25,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
)
def test_rope_equals_transformers(rope):
    config = make_config(rope=rope, max_position_embeddings=128)
    positions = torch.tensor([[0, 1, 7, 100], [3, 4, 90, 127]])
    cos, signed_sin = Rotary(config)(positions, torch.float32)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(
            hidden_size=64,
            num_attention_heads=4,
            head_dim=16,
            max_position_embeddings=128,
            rope_parameters=dict(rope),
        )
    )
    their_cos, their_sin = theirs(torch.zeros(1), positions)
    sign = torch.cat((-torch.ones(8), torch.ones(8)))
    torch.testing.assert_close(cos[:, :, 0], their_cos)
    torch.testing.assert_close(signed_sin[:, :, 0], their_sin * sign)


def test_rope_frequencies_stay_float32_in_a_bfloat16_model():
    positions = torch.arange(4000, 4010)[None]
    exact = Rotary(make_config())(positions, torch.float32)[0]
    cast = make_model().bfloat16().rotary(positions, torch.float32)[0]
    assert torch.equal(exact, cast)


def test_norm_matches_qwen3():
    ours, theirs = RMSNorm(64, 1e-6), Qwen3RMSNorm(64, 1e-6)
    with torch.no_grad():
        ours.weight.copy_(torch.randn(64))
        theirs.weight.copy_(ours.weight)
    x = 3 * torch.randn(5, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=1e-5)
    coarse = x.bfloat16()
    ours.bfloat16(), theirs.bfloat16()
    # One rounding against two: at most one unit in the last place apart.
    torch.testing.assert_close(ours(coarse), theirs(coarse), rtol=2**-7, atol=0)


def test_block_masks_equal_the_definition():
    for causal in (None, True, False):
        model = make_model(layer_types=MIXED, sliding_window=5, causal=causal)
        masks = model.block_masks(9, 8)
        for kind, mask in masks.items():
            one_way = model.config.is_causal(kind)
            window = 5 if kind == "sliding_attention" else 1000
            for q in range(9, 17):
                for k in range(17):
                    visible = abs(q - k) < window and not (one_way and k > q)
                    assert visible == (mask is None or bool(mask[0, 0, q - 9, k]))
    assert make_model().block_masks(9, 8) == {"full_attention": None}


def test_training_form_equals_decoding_and_leaks_nothing():
    model = make_model(block_size=4)
    features, _ = make_inputs(model, 20)
    features.requires_grad_(True)
    embeddings = make_inputs(model, 1)[1].repeat(1, 2, 1)
    anchors = torch.tensor([6, 13])
    positions = (anchors[:, None] + torch.arange(4)).reshape(1, -1)
    block = torch.arange(8) // 4
    sees_context = torch.arange(20) < anchors[block][:, None]
    mask = torch.cat((sees_context, block[:, None] == block), dim=1)[None, None]
    context = ConcatContext(model.project_context(features, torch.arange(20)[None]))
    hidden = model(embeddings, positions, context, {"full_attention": mask})

    for i, anchor in enumerate(anchors.tolist()):
        alone = run(model, features[:, :anchor], embeddings[:, :4])
        assert close(hidden[:, 4 * i : 4 * i + 4], alone)
    (gradient,) = torch.autograd.grad(hidden[:, :4].square().sum(), features, retain_graph=True)
    assert gradient[:, 6:].abs().max() == 0
    assert gradient[:, :6].abs().min() > 0
    hidden.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_a_layer_without_its_mask_is_an_error():
    model = make_model(layer_types=MIXED, sliding_window=5)
    features, embeddings = make_inputs(model, 4)
    context = ConcatContext(model.project_context(features, torch.arange(4)[None]))
    with pytest.raises(KeyError):
        model(embeddings, torch.arange(4, 12)[None], context, {"full_attention": None})


def test_logits_are_multiplied_then_capped():
    model = make_model(output_multiplier=0.5, final_logit_softcapping=4.0)
    hidden, head = torch.randn(1, 8, 64), torch.randn(97, 64)
    expected = 4.0 * torch.tanh(0.5 * hidden @ head.T / 4.0)
    torch.testing.assert_close(model.logits(hidden, head), expected)
    assert model.logits(hidden, head).abs().max() <= 4.0
    torch.testing.assert_close(make_model().logits(hidden, head), hidden @ head.T)


def test_embeddings_are_scaled_rows_of_the_matrix():
    weight = torch.randn(97, 64)
    token_ids = torch.tensor([[3, 96]])
    assert torch.equal(make_model().embed(token_ids, weight), weight[token_ids])
    scaled = make_model(input_embedding_scale=8.0).embed(token_ids, weight)
    assert torch.equal(scaled, 8.0 * weight[token_ids])


def test_a_slice_gets_the_strides_of_a_fresh_tensor():
    sliced = torch.randn(1, 6, 8)[:, 1:]
    assert sliced.stride() == (48, 8, 1)
    assert with_fresh_strides(sliced).stride() == (40, 8, 1)
    assert torch.equal(with_fresh_strides(sliced), sliced)


def test_unknown_activation_and_broken_rope_are_model_errors():
    with pytest.raises(ModelError, match="'swishy' is unknown"):
        DraftModel(make_config(hidden_act="swishy"))
    broken = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0}
    broken |= {"high_freq_factor": 4.0, "original_max_position_embeddings": "two"}
    with pytest.raises(ModelError, match="not usable"):
        DraftModel(make_config(rope=broken))
