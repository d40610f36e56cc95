"""A drafter that begins from the target's own layers."""

import pytest
import torch
from transformers import Gemma4TextConfig, Lfm2Config, MambaConfig

from blockdraft.core.errors import ConfigError, ModelError
from blockdraft.data.store import Example
from blockdraft.train.drafter import copy_target_layers, draft_config_for, feature_layers
from blockdraft.train.prepare import shape_of
from tests.tiny import (
    SPECIAL_TOKENS,
    TEXT_VOCAB_SIZE,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
)
from tests.train_runs import small_config


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (30, 5, (1, 8, 14, 20, 27)),
        (4, 1, (2,)),
        (4, 3, (0, 1, 3)),
        (4, 4, (0, 1, 2, 3)),
        (8, 6, (0, 1, 2, 4, 5, 7)),
        (2, 2, (0, 1)),
        (3, 2, (0, 2)),
    ],
)
def test_no_layer_is_read_twice_and_none_before_an_earlier_one(num_layers, num_features, expected):
    assert feature_layers(num_layers, num_features) == expected


def test_more_features_than_layers_are_refused():
    with pytest.raises(ConfigError, match="num_features is 5, and the target has 4 layers"):
        feature_layers(4, 5)


def test_the_mask_may_be_a_special_token_that_has_no_part(tmp_path):
    """As Llama 3 has them: begin and end are in every answer, and hundreds more are reserved."""
    start, end, mask = tiny_tokenizer().convert_tokens_to_ids(SPECIAL_TOKENS)
    config, target = small_config(tmp_path), tiny_target(vocab_size=TEXT_VOCAB_SIZE)
    used = Example(id="a", set="s", prompt_ids=(start, 5), response_ids=(6, end))
    assert shape_of(config, target, [used]).mask_token_id == mask
    unused = Example(id="a", set="s", prompt_ids=(5,), response_ids=(6,))
    assert shape_of(config, target, [unused]).mask_token_id == end


SHAPE = {"num_layers": 2, "block_size": 6, "num_features": 2, "mask_token_id": 3}


def test_the_epsilon_of_norms_is_found_under_other_names():
    config = Lfm2Config(num_hidden_layers=4, norm_eps=0.25)
    assert draft_config_for(config, **SHAPE).rms_norm_eps == 0.25


def test_heads_are_those_of_the_first_layer_where_layers_differ():
    config = Gemma4TextConfig(num_hidden_layers=6, head_dim=128, global_head_dim=256)
    assert draft_config_for(config, **SHAPE).head_dim == 128


def test_a_target_without_the_sizes_of_attention_is_refused():
    with pytest.raises(ModelError, match="MambaConfig has no single num_attention_heads"):
        draft_config_for(MambaConfig(num_hidden_layers=4), **SHAPE)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_it_has_the_weights_of_the_last_layers(kind):
    model, target = tiny_drafter(), tiny_target(kind)
    copy_target_layers(model, target)
    layers = target.model.layers[-2:]
    for mine, theirs in zip(model.layers, layers, strict=True):
        weights = mine.state_dict()
        for name, value in theirs.state_dict().items():
            assert torch.equal(weights[name], value)
    x = torch.randn(2, 5, model.fc.in_features)
    torch.testing.assert_close(model.fc(x), x[..., -64:])
    assert torch.equal(model.norm.weight, target.model.norm.weight)


def test_queries_keep_the_size_that_they_have_without_a_norm():
    model, target = tiny_drafter(), tiny_target("llama")
    copy_target_layers(model, target)
    normed = torch.randn(4000, 64) * target.model.layers[-1].input_layernorm.weight
    theirs = target.model.layers[-1].self_attn.q_proj(normed).view(-1, 4, 16)
    weight = model.layers[-1].self_attn.q_norm.weight
    torch.testing.assert_close(theirs.square().mean((0, 1)).sqrt(), weight, rtol=0.1, atol=0)


def test_layers_of_another_kind_are_refused():
    with pytest.raises(ModelError, match="init=random"):
        copy_target_layers(tiny_drafter(), tiny_target("gemma3"))
    with pytest.raises(ModelError, match=r"have it as .*init=random"):
        copy_target_layers(tiny_drafter(intermediate_size=80), tiny_target())
