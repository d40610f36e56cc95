import copy
import math
from typing import Any

import pytest

from blockdraft.core.errors import ModelError
from blockdraft.models.draft.config import (
    DFlash2Config,
    DominoConfig,
    DraftConfig,
    DSparkConfig,
    default_target_layer_ids,
)

BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 97,
    "rope_theta": 10000.0,
    "num_target_layers": 12,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 5, 9]},
}


def config(nested: dict[str, Any] | None = None, **top: Any) -> DraftConfig:
    """BASE with changes; a value of None removes the key."""
    raw = copy.deepcopy(BASE)
    raw["dflash_config"] |= nested or {}
    raw |= top
    for place in (raw, raw["dflash_config"]):
        for name in [name for name, value in place.items() if value is None]:
            del place[name]
    return DraftConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("num_layers", "num_features", "expected"),
    [
        (16, 5, [1, 4, 7, 10, 13]),
        (24, 5, [1, 6, 11, 16, 21]),
        (28, 3, [1, 13, 25]),
        (28, 5, [1, 7, 13, 19, 25]),
        (30, 3, [1, 14, 27]),
        (30, 5, [1, 8, 14, 20, 27]),
        (32, 5, [1, 8, 15, 22, 29]),
        (36, 3, [1, 17, 33]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (48, 5, [1, 12, 23, 34, 45]),
        (60, 6, [1, 12, 23, 35, 46, 57]),
        (61, 6, [1, 12, 24, 35, 47, 58]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 1, [18]),
        (13, 1, [6]),
    ],
)
def test_default_layer_ids_are_the_published_ones(num_layers, num_features, expected):
    assert default_target_layer_ids(num_layers, num_features) == tuple(expected)


def test_layer_ids_default_to_as_many_as_the_drafter_has_layers():
    assert config({"target_layer_ids": None}).target_layer_ids == (1, 5, 9)


def test_features_may_outnumber_layers():
    assert config({"target_layer_ids": [1, 4, 6, 9]}).num_features == 4


def test_block_size_nested_top_level_and_both():
    assert config({"block_size": 4}, block_size=None).block_size == 4
    assert config(block_size=16).block_size == 16
    assert config({"block_size": 4}, block_size=16).block_size == 4


def test_every_drafter_key_may_stand_at_the_top_level():
    raw = copy.deepcopy(BASE)
    raw |= raw.pop("dflash_config")
    assert DraftConfig.from_dict(raw) == config()


@pytest.mark.parametrize(
    ("places", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_scaling": {"rope_theta": 5e5, "type": "linear", "factor": 2.0}}, 5e5),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5}, 5e5),
        ({}, 1e4),
    ],
)
def test_theta_is_found_in_all_three_places(places, theta):
    rope = config(**({"rope_theta": None} | places)).rope
    assert rope["rope_theta"] == theta
    assert rope["rope_type"] == ("linear" if "rope_scaling" in places else "default")


def test_causality_follows_the_kind_unless_told():
    default = config()
    assert default.is_causal("sliding_attention")
    assert not default.is_causal("full_attention")
    for told in ({"nested": {"causal": False}}, {"is_causal": False}):
        assert not config(**told).is_causal("sliding_attention")
    assert config(is_causal=True).is_causal("full_attention")
    assert not config({"causal": False}, is_causal=True).is_causal("full_attention")


def test_sliding_layers_from_layer_types_and_from_max_window_layers():
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    named = config(layer_types=kinds, sliding_window=5, use_sliding_window=True)
    assert (named.layer_types, named.sliding_window) == (tuple(kinds), 5)
    counted = config(use_sliding_window=True, sliding_window=5, max_window_layers=1)
    assert counted.layer_types == ("full_attention", "sliding_attention", "sliding_attention")
    unused = config(sliding_window=5, use_sliding_window=False)
    assert (set(unused.layer_types), unused.sliding_window) == ({"full_attention"}, None)


def test_use_swa_slides_everywhere_without_causality():
    swa = config({"use_swa": True, "swa_window_size": 7})
    assert set(swa.layer_types) == {"sliding_attention"}
    assert swa.sliding_window == 7
    assert not swa.is_causal("sliding_attention")
    assert config({"use_swa": True, "swa_window_size": 7, "causal": True}).causal


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"nested": {"output_multiplier": 0.2, "final_logit_softcapping": 20.0}},
        {"nested": {"input_embedding_scale": 8.0, "use_swa": True, "swa_window_size": 7}},
        {"attention_bias": True, "target_hidden_size": 48, "num_target_layers": None},
        {"layer_types": ["sliding_attention"] * 3, "sliding_window": 5, "is_causal": False},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ],
)
def test_to_dict_reads_back_equal(changes):
    original = config(**changes)
    raw = original.to_dict()
    assert DraftConfig.from_dict(raw) == original
    assert raw["block_size"] == raw["dflash_config"]["block_size"] == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nested": {"mask_token_id": None}}, "no mask_token_id"),
        ({"nested": {"mask_token_id": 97}}, r"mask_token_id 97 .*\(0 to 96\)"),
        ({"nested": {"mask_token_id": -1}}, "mask_token_id -1"),
        ({"nested": {"mask_token_id": "96"}}, "give an integer"),
        ({"nested": {"target_layer_ids": [1, 12]}}, r"\[12\] are out of range.* 0 to 11"),
        ({"nested": {"target_layer_ids": [-1]}}, "out of range"),
        ({"nested": {"target_layer_ids": []}}, "empty"),
        ({"nested": {"target_layer_ids": [1.5]}}, "0-based"),
        ({"nested": {"target_layer_ids": None}, "num_target_layers": None}, "neither"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": None}, "no block_size"),
        ({"block_size": 10**7}, "block_size is 10000000 .* more than its 32768 positions"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 15}, "even"),
        ({"rms_norm_eps": "small"}, "give a number"),
        ({"attention_bias": 1}, "true or false"),
        ({"hidden_act": 3}, "give a string"),
        ({"intermediate_size": 0}, "must be positive"),
        ({"layer_types": ["full_attention"]}, "names 1 layers"),
        ({"layer_types": "full_attention"}, "give a list"),
        ({"layer_types": [["full_attention"]] * 3}, "give a list"),
        ({"architectures": "DFlashDraftModel"}, "give a list"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_att"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding_window"),
        (
            {
                "layer_types": ["sliding_attention"] * 3,
                "sliding_window": 5,
                "use_sliding_window": False,
            },
            "one or the other",
        ),
        ({"nested": {"use_swa": True}}, "no swa_window_size"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "needs factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one flat object"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4' .*; give a number"),
        ({"rope_theta": 0}, "rope_theta is 0 .*; it must be positive"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0 .* be positive"),
        ({"nested": {"output_multiplier": 0}}, "output_multiplier is 0.0 .* be positive"),
        ({"nested": {"output_multiplier": math.nan}}, "output_multiplier is nan .* be positive"),
        ({"nested": {"input_embedding_scale": math.inf}}, "scale is inf .* be positive"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"partial_rotary_factor": 0.5},
            },
            "partial_rotary_factor",
        ),
    ],
)
def test_bad_values_are_named(changes, message):
    with pytest.raises(ModelError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nested": {"conv_kernel_size": 2}}, "conv_kernel_size = 2, which belongs to DFlash 2"),
        ({"selector_rank": 8}, "selector_rank = 8, which belongs to DFlash 2"),
        ({"nested": {"projector_type": "dlinear"}}, "'dlinear': it is a drafter of another"),
        ({"nested": {"markov_rank": 8}}, "belongs to DSpark, .* name DSparkDraftModel there"),
        ({"use_confidence_head": True}, "use_confidence_head = True, which belongs to DSpark"),
        ({"nested": {"gru_hidden_dim": 8}}, "belongs to Domino, .* name DominoDraftModel there"),
        (
            {"architectures": ["DominoDraftModel"], "nested": {"projector_type": "dspark"}},
            r"\['DominoDraftModel'\] and projector_type = 'dspark'; make it say one or the other",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, "another model"),
        ({"nested": {"attention_sink_bias": True}}, "attention_sink_bias"),
        ({"nested": {"attention_mode": "mla"}}, "attention_mode = 'mla'"),
        ({"nested": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
        ({"nested": {"draft_window_size": 64}}, "draft_window_size"),
        ({"is_neox_style": False}, "is_neox_style"),
        ({"nested": {"frobnicate": 1}}, "unknown keys in dflash_config: frobnicate"),
    ],
)
def test_other_drafters_are_refused_by_name(changes, message):
    with pytest.raises(ModelError, match=message):
        config(**changes)


def test_switched_off_features_are_accepted():
    nested = {"projector_type": "dflash", "shift_label": False, "runtime_block_size": 4}
    assert config(nested, logit_scale=1.0, mlp_bias=False) == config()


DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}


def dflash2_config(nested: dict[str, Any], **top: Any) -> DraftConfig:
    return config(nested, architectures=["DFlash2DraftModel"], **top)


def test_dflash2_keys_are_read_from_both_places_and_written_back():
    expected = DFlash2Config(**DFLASH2)
    for found in (dflash2_config(DFLASH2), dflash2_config({}, **DFLASH2)):
        assert found.dflash2 == expected
        raw = found.to_dict()
        assert raw["architectures"] == ["DFlash2DraftModel"]
        assert DFLASH2.items() <= raw["dflash_config"].items()
        assert DraftConfig.from_dict(raw) == found
    assert config().dflash2 is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"selector_rank": None}, "has no selector_rank, neither in dflash_config nor at the top"),
        ({"conv_group_size": 24}, "conv_group_size 24 does not divide hidden_size 64"),
        ({"conv_kernel_size": 0}, "conv_kernel_size is 0 in the drafter's config; it must be pos"),
        ({"selector_top_k": 98}, "selector_top_k is 98 .* has 97 tokens; give at most that many"),
        ({"selector_top_k": "6"}, "selector_top_k is '6' .* give an integer"),
    ],
)
def test_dflash2_keys_that_are_missing_or_do_not_fit_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        dflash2_config(DFLASH2 | changes)


@pytest.mark.parametrize(
    "told",
    [
        {"architectures": ["Qwen3DFlash2DraftModel"]},
        {"architectures": ["DFlash2DraftModel"], "projector_type": "dflash2"},
        {"architectures": ["DFlashDraftModel"], "projector_type": "dflash2"},
    ],
    ids=str,
)
def test_dflash2_as_other_trainers_name_it(told):
    assert config(DFLASH2, **told) == dflash2_config(DFLASH2)


def test_automodels_dflash_may_be_causal():
    found = config({"causal": True}, architectures=["Qwen3DFlashDraftModel"], is_causal=False)
    assert found == config({"causal": True})


def test_layers_that_are_named_for_other_engines_alone():
    named = {"eagle_aux_hidden_state_layer_ids": [3, 6, 12]}
    assert config({"target_layer_ids": None}, **named).target_layer_ids == (2, 5, 11)
    assert config(**named).target_layer_ids == (1, 5, 9)


DSPARK: dict[str, Any] = {"markov_rank": 8, "markov_head_type": "gated"}
DOMINO: dict[str, Any] = {"emb_dim": 4, "gru_hidden_dim": 6, "pure_draft_prefix_len": 1}


@pytest.mark.parametrize("name", ["DSparkDraftModel", "Qwen3DSparkModel", "DFlashDraftModel"])
def test_dspark_keys_are_read_from_both_places_and_written_back(name):
    told = {"architectures": [name], "projector_type": "dspark"}
    expected = DSparkConfig(markov_rank=8, markov_head_type="gated")
    for found in (config(DSPARK, **told), config({}, **told, **DSPARK)):
        assert (found.kind, found.dspark) == ("dspark", expected)
        assert (found.drafts_from_anchor, found.num_drafted) == (True, 8)
        raw = found.to_dict()
        assert raw["architectures"] == ["DSparkDraftModel"]
        assert DraftConfig.from_dict(raw) == found
    masked = config(DSPARK | {"sample_from_anchor": False}, **told)
    assert (masked.first_slot, masked.num_drafted) == (1, 7)
    assert DraftConfig.from_dict(masked.to_dict()) == masked


def test_domino_keys_are_read_from_both_places_and_written_back():
    for told in ({"architectures": ["DominoDraftModel"]}, {"projector_type": "domino"}):
        for found in (config(DOMINO, **told), config({}, **told, **DOMINO)):
            assert (found.kind, found.domino) == ("domino", DominoConfig(**DOMINO))
            assert not found.drafts_from_anchor
            assert DraftConfig.from_dict(found.to_dict()) == found
        shifted = config(DOMINO | {"shift_label": True}, **told)
        assert (shifted.first_slot, shifted.num_drafted) == (0, 8)
        assert DraftConfig.from_dict(shifted.to_dict()) == shifted


def test_the_anchors_slot_may_draft_without_a_head():
    """As in DeepSpec's DFlash drafters, which name DSpark and a rank of 0."""
    plain = config({"sample_from_anchor": True})
    assert (plain.kind, plain.num_drafted) == ("dflash", 8)
    assert DraftConfig.from_dict(plain.to_dict()) == plain
    none = config({}, architectures=["Qwen3DSparkModel"], markov_rank=0, num_anchors=512)
    assert (none.kind, none.num_drafted) == ("dspark", 8)
    assert DraftConfig.from_dict(none.to_dict()) == none


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("dspark", {"markov_rank": None}, "has no markov_rank, neither in dflash_config nor at"),
        ("dspark", {"markov_rank": -1}, "markov_rank is -1 in the drafter's config; it must be"),
        ("dspark", {"markov_rank": "8"}, "markov_rank is '8' .* give an integer"),
        ("dspark", {"markov_head_type": "deep"}, "'deep' .* known are vanilla, gated, rnn"),
        ("dspark", {"sample_from_anchor": 1}, "sample_from_anchor is 1 .* give true or false"),
        (
            "dspark",
            {"sample_from_anchor": True, "shift_label": False},
            "sample_from_anchor = True and shift_label = False; both say .* make them equal",
        ),
        (
            "dspark",
            {"markov_head_type": "rnn", "sample_from_anchor": False},
            "whether its state starts at that slot is unknown",
        ),
        ("dspark", {"emb_dim": 4}, "emb_dim = 4, which belongs to Domino"),
        ("domino", {"emb_dim": None}, "has no emb_dim, neither"),
        ("domino", {"gru_hidden_dim": None}, "has no gru_hidden_dim, neither"),
        ("domino", {"gru_hidden_dim": 0}, "gru_hidden_dim is 0 .* it must be positive"),
        ("domino", {"pure_draft_prefix_len": 7}, "its block drafts 7 tokens; give a .* 0 to 6"),
        ("domino", {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len is -1"),
        ("domino", {"markov_rank": 4}, "markov_rank = 4, which belongs to DSpark"),
        ("dflash2", {"sample_from_anchor": True}, "not supported for the kind dflash2"),
    ],
)
def test_keys_of_the_successors_that_are_missing_or_do_not_fit_are_refused(kind, changes, message):
    keys = {"dspark": DSPARK, "domino": DOMINO, "dflash2": DFLASH2}[kind]
    names = {"dspark": "DSpark", "domino": "Domino", "dflash2": "DFlash2"}
    with pytest.raises(ModelError, match=message):
        config(keys | changes, architectures=[f"{names[kind]}DraftModel"])
