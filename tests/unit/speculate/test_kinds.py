"""From a folder to a drafter of its kind: what published configs name, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ModelError
from blockdraft.diagnose.doctor.examine import examine
from blockdraft.diagnose.doctor.pair import read_pair
from blockdraft.diagnose.fit import examine_fit
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.eagle3_config import Eagle3Config, default_layer_ids
from blockdraft.speculate.drafters.kinds import kind_of, load_checkpoint
from tests.eagle import KNOWN, make_model
from tests.tiny import (
    HIDDEN_SIZE,
    LAYER_IDS,
    TEXT_VOCAB_SIZE,
    VOCAB_SIZE,
    edit_json,
    tiny_draft_config,
    tiny_target,
    tiny_target_folder,
)

EAGLE = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}
"""As the method's authors have published."""


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (EAGLE, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "eagle_config": {}}, "eagle3"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "draft_model"),
        # Whose reader refuses it by its name: it is no language model that runs alone.
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "dflash"),
        ({"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "draft_vocab_size": 32000}, "dflash"),
        ({"architectures": ["DSparkDraftModel"]}, "dspark"),
        ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "dspark"),
        ({"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["DominoDraftModel"]}, "domino"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
            "domino",
        ),
        ({"architectures": ["DFlashDraftModel"], "projector_type": "dflash2"}, "dflash2"),
        ({"architectures": ["Qwen3DFlashDraftModel"], "projector_type": "domino"}, "domino"),
        ({"architectures": ["Qwen3DFlash2DraftModel"]}, "dflash2"),
        ({"architectures": ["Qwen3DFlyModel"], "model_arch": "dflash"}, "dfly"),
        ({"architectures": ["DFlashDraftModel"], "model_arch": "dflash"}, "dflash"),
        ({"architectures": ["DFlashDraftModel"], "model_arch": "dflare"}, "dflare"),
        ({"architectures": ["DSparkDraftModel"], "model_arch": "dflash"}, "dspark"),
        ({"architectures": ["DSparkDraftModel"], "model_arch": "dfly"}, "dfly"),
        ({"architectures": ["DSparkDraftModel"], "model_arch": "dflare"}, "dspark"),
        ({"architectures": ["DFlashDraftModel"], "dflash_config": ["broken"]}, "dflash"),
        ({}, "dflash"),
        (tiny_draft_config().to_dict(), "dflash"),
    ],
    ids=str,
)
def test_the_kind_of_a_published_config(config: dict[str, Any], kind: str) -> None:
    assert kind_of(config) == kind


def speculators_folder(folder: Path, model: Eagle3Model) -> Path:
    """The model in the layout of the speculators library, without what equals a default."""
    folder.mkdir()
    config = model.config
    layer = {
        "model_type": "qwen3" if config.head_norms else "llama",
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
    }
    raw = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in LAYER_IDS],
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "anything"}},
    }
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in model.state_dict().items()}
    known = torch.tensor(model.draft_vocabulary)
    tensors["d2t"] = known - torch.arange(len(known))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
    tensors["t2d"][known] = True
    tensors["verifier_norm.weight"] = torch.ones(config.hidden_size)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"norm_before_residual": True, "head_norms": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True},
    ],
)
def test_both_layouts_give_the_same_drafter(fields: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(**fields)
    model.save_pretrained(tmp_path / "authors")
    # The library's defaults are other ones.
    of_library = speculators_folder(tmp_path / "library", model)
    defaults = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
    raw = json.loads((of_library / "config.json").read_text(encoding="utf-8"))
    raw["transformer_layer_config"] |= defaults
    edit_json(of_library / "config.json", **raw)
    target = tiny_target()
    for folder in (tmp_path / "authors", of_library):
        loaded = Eagle3Model.from_pretrained(folder)
        assert loaded.config == model.config
        assert loaded.draft_vocabulary == KNOWN
        for name, value in model.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[name], value)
        checkpoint = load_checkpoint(folder, target, torch.float32, "cpu")
        assert checkpoint.feature_layers == LAYER_IDS
        assert checkpoint.drafter(target, None).kind == "eagle3"


def test_a_config_as_the_authors_wrote_it(tmp_path: Path) -> None:
    """Layers by their rule, no heads' size, and an embedding that is the target's."""
    model = make_model(target_layer_ids=None)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"], head_dim=None)
    loaded = Eagle3Model.from_pretrained(tmp_path)
    assert (loaded.config.target_layer_ids, loaded.own_embedding) == (None, None)
    checkpoint = load_checkpoint(tmp_path, tiny_target(), torch.float32, "cpu")
    assert checkpoint.feature_layers == default_layer_ids(4)
    # They take the state that enters layers 2, 16 and 29 of 32.
    assert default_layer_ids(32) == (1, 15, 28)


def test_a_config_as_modelopt_writes_it() -> None:
    raw = make_model(target_layer_ids=None).config.to_dict()
    raw["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [],
        "next_layer_regular": True,
        "parallel_draft_heads_num_layers": 1,
        "parallel_draft_step": 1,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    }
    assert Eagle3Config.from_dict(raw).layers_of(32) == (1, 15, 28)
    raw["eagle_config"] |= {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}
    assert Eagle3Config.from_dict(raw).layers_of(32) == (2, 5, 9)
    assert not Eagle3Config.from_dict(raw).norm_before_fc
    raw["eagle_config"] |= {"norm_before_fc": True}
    assert Eagle3Config.from_dict(raw).norm_before_fc


BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 2}, "num_hidden_layers = 2"),
    ({"norm_before_fc": True}, r"1 missing \(input_norm.weight"),
    ({"fc_norm": True}, r"3 missing \(fc_norm.0.weight"),
    ({"fc_norm": True, "norm_before_fc": True}, "are both true"),
    ({"norm_output": "yes"}, "norm_output is 'yes'"),
    ({"attention_bias": True}, "attention_bias = True"),
    ({"kv_lora_rank": 512}, "kv_lora_rank = 512"),
    ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm = False"),
    ({"eagle_config": {"parallel_draft_step": 2}}, "parallel_draft_step = 2"),
    ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
    ({"eagle_config": {"residual_scale": 2}}, "residual_scale"),
    ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}, "different layers"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "eagle_config": None}, "embedding"),
    ({"draft_vocab_size": 59}, "its d2t names 60"),
    ({"draft_vocab_size": VOCAB_SIZE + 1}, "is more than vocab_size"),
    ({"hidden_size": None}, "has no hidden_size"),
    ({"head_dim": 7}, "head_dim is 7"),
    ({"num_key_value_heads": 3}, "is not a multiple"),
    ({"intermediate_size": 49}, "of the wrong shape"),
    ({"vocab_size": VOCAB_SIZE + 1}, "vocabulary size is 98 in the drafter and 97"),
    ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=str)
def test_what_is_not_understood_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_model().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(ModelError, match=message):
        load_checkpoint(tmp_path, tiny_target(), torch.float32, "cpu")


def test_tensors_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = load_file(path)
    for change, message in (
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(64)}, "1 unexpected"),
        ({"d2t": torch.zeros(60, dtype=torch.long)}, "name different tokens"),
        ({"embed_tokens.weight": torch.zeros(3, HIDDEN_SIZE)}, "embed_tokens.weight"),
    ):
        save_file(whole | change, path)
        with pytest.raises(ModelError, match=message):
            Eagle3Model.from_pretrained(tmp_path)
    save_file({name: t for name, t in whole.items() if name != "fc.weight"}, path)
    with pytest.raises(ModelError, match=r"1 missing \(fc.weight"):
        Eagle3Model.from_pretrained(tmp_path)


def test_layers_and_sizes_of_another_target_are_refused(tmp_path: Path) -> None:
    make_model(target_layer_ids=(0, 1, 9)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"it reads layers \[9\], and the target has"):
        load_checkpoint(tmp_path, tiny_target(), torch.float32, "cpu")
    make_model(target_hidden_size=48).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="features is 48 in the drafter and 64"):
        load_checkpoint(tmp_path, tiny_target(), torch.float32, "cpu")


def test_a_config_is_read_back() -> None:
    shapes: list[dict[str, Any]] = [
        {},
        {"head_norms": True},
        {"target_layer_ids": None},
        {"target_layer_ids": None, "fc_norm": True, "norm_output": True},
    ]
    for fields in shapes:
        config = make_model(**fields).config
        assert Eagle3Config.from_dict(config.to_dict()) == config
    scaled = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
    config = make_model(rope=scaled).config
    assert Eagle3Config.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("kinds", [["sliding_attention"], [["full_attention"]], 3])
def test_layers_of_other_kinds_are_refused(kinds: object) -> None:
    raw = make_model().config.to_dict()
    assert Eagle3Config.from_dict(raw | {"layer_types": ["full_attention"] * 28}).head_dim
    with pytest.raises(ModelError, match="windows are not supported in EAGLE-3 drafters"):
        Eagle3Config.from_dict(raw | {"layer_types": kinds})


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tiny_target_folder(tmp_path)


def test_models_check_says_what_each_kind_is(target: Path, tmp_path: Path) -> None:
    eagle, other = tmp_path / "eagle", tiny_target_folder(tmp_path / "other")
    make_model(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(eagle)
    fit = examine_fit(target, eagle, torch.float32)
    facts = fit.drafter
    assert (fit.fits, facts.kind, facts.layout) == (True, "eagle3", "SafeAILab")
    assert (facts.target_layer_ids, facts.guessed_tokens) == (LAYER_IDS, 60)
    assert (facts.block_size, facts.longest_path) == (None, 7)
    fit = examine_fit(target, other, torch.float32)
    assert (fit.fits, fit.drafter.kind) == (True, "draft_model")
    assert fit.drafter.weight_bytes == fit.target.weight_bytes
    assert fit.drafter.kv_bytes_per_token == fit.target.kv_bytes_per_token
    make_model().save_pretrained(eagle)
    assert "vocabulary size" in str(examine_fit(target, eagle, torch.float32).reason)


def test_the_doctor_looks_at_each_kind(target: Path, tmp_path: Path) -> None:
    eagle, other = tmp_path / "eagle", tiny_target_folder(tmp_path / "other")
    make_model(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(eagle)
    for folder, kind in ((eagle, "eagle3"), (other, "draft_model")):
        config = LLMConfig(target=str(target), drafter=str(folder), dtype="float32")
        found = examine(read_pair(config, "template"), lambda stage, share: None, quick=True)
        checks = {check.name: check for check in found.checks}
        assert (checks["pair"].mark, "mask token" in checks) == ("ok", False)
        assert kind in checks["pair"].found
        assert checks["precision"].found == "runs in float32, its file is in float32"
