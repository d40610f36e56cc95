"""Configs as AngelSpec exports them: what they say in the terms of the published layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.core.errors import ModelError
from blockdraft.models.draft.config import DFlyConfig, DraftConfig
from blockdraft.models.draft.dflash import DraftModel
from tests.published import HIDDEN, PUBLISHED, shallow, write_published
from tests.tiny import LAYER_FUSIONS, tiny_drafter

NAMES = [name for name in PUBLISHED if "DFly" in name or "AngelSpec" in name]


def read(name: str, **changes: Any) -> DraftConfig:
    return DraftConfig.from_dict({**PUBLISHED[name].config, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_the_target_and_slots(name: str) -> None:
    """The anchor's slot predicts nothing, in DSpark neither, unless the config says so."""
    config = read(name)
    assert (config.num_target_layers, config.first_slot, config.num_drafted) == (36, 1, 7)
    assert read(name, sample_from_anchor=True).first_slot == 0
    assert read(name, target_num_hidden_layers=None).num_target_layers is None


def test_each_kind() -> None:
    assert [read(name).kind for name in NAMES] == ["dfly", "dfly", "dflare", "dflash", "dspark"]
    assert read(NAMES[0]) == read(NAMES[1])
    dfly = "Qwen3-8B-DFly-B8"
    assert read(dfly).dfly == DFlyConfig(hidden_correction_intermediate_size=HIDDEN)
    assert read(dfly, enable_hidden_correction=None).dfly == read(dfly).dfly
    found = read(dfly, hidden_correction_intermediate_size=12)
    assert found.dfly == DFlyConfig(hidden_correction_intermediate_size=12)
    found = read(dfly, enable_hidden_correction=False)
    assert found.dfly == DFlyConfig(hidden_correction_intermediate_size=0)


def test_dfly_has_none_of_the_heads_of_dspark() -> None:
    """Its configs may have their keys."""
    dfly = "Qwen3-8B-DFly-B8"
    heads = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    assert read(dfly, **heads) == read(dfly)


def test_layers_that_no_config_names() -> None:
    """As many as the drafter has, by the rule of all DFlash drafters, which is AngelSpec's too."""
    found = read("AngelSpec DFlash", target_layer_ids=None)
    assert found.target_layer_ids == (1, 9, 17, 25, 33)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("AngelSpec DFlash", {"block_size": None}, "add the dflash_block_size that it was trained"),
        ("AngelSpec DFlash", {"architectures": 3}, "architectures is 3 .* give a list of names"),
        ("AngelSpec DFlash", {"num_target_layers": 4}, "= 4, and target_layer_ids names 5"),
        ("AngelSpec DFlare", {"target_layer_ids": None}, "num_target_layers = 9; add the layers"),
        ("AngelSpec DFlash", {"fusion_type": "gated_sum"}, "fusion_type = 'gated_sum': it is a"),
        ("AngelSpec DFlash", {"model_arch": "mtp"}, "model_arch = 'mtp': it is a drafter of an"),
        ("AngelSpec DFlash", {"enable_hidden_correction": True}, "which belongs to DFly"),
        ("AngelSpec DSpark", {"model_arch": "dflare"}, "model_arch = 'dflare'; make it say"),
        ("Qwen3-8B-DFly-B8", {"hidden_correction_type": "linear"}, "hidden_correction_type = 'lin"),
        ("Qwen3-8B-DFly-B8", {"hidden_correction_intermediate_size": -1}, "it must be positive"),
        ("Qwen3-8B-DFly-B8", {"target_hidden_size": 48}, "is 48 .*, and hidden_size 40; they are"),
        ("AngelSpec DFlare", {"target_hidden_size": 48}, "of the kind dflare, which adds up"),
        ("Qwen3-8B-DFly-B8", {"final_logit_softcapping": 9.0}, "not supported for the kind dfly"),
        ("Qwen3-8B-DFly-B8", {"emb_dim": 8}, "which belongs to Domino"),
        (
            "Qwen3-8B-DFly-B8, first version",
            {"hidden_correction_pos_adaptive": True},
            "hidden_correction_pos_adaptive = True",
        ),
        ("AngelSpec DSpark", {"markov_pos_adaptive": True}, "markov_pos_adaptive = True"),
    ],
)
def test_what_is_not_understood_is_refused(
    name: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        read(name, **changes)


@pytest.mark.parametrize("name", ["Qwen3-8B-DFly-B8", "AngelSpec DFlare"])
def test_tensors_of_another_kind_are_named(name: str, tmp_path: Path) -> None:
    write_published(tmp_path / "its", shallow(PUBLISHED[name]))
    write_published(tmp_path / "other", shallow(PUBLISHED["AngelSpec DFlash"]))
    (tmp_path / "its" / "config.json").write_bytes((tmp_path / "other/config.json").read_bytes())
    with pytest.raises(ModelError, match=r"it is a DFl.* drafter, and its config.json"):
        DraftModel.from_pretrained(tmp_path / "its")


@pytest.mark.parametrize("fields", LAYER_FUSIONS.values(), ids=LAYER_FUSIONS)
def test_a_saved_drafter_is_loaded_again(fields: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_drafter(**fields)
    model.save_pretrained(tmp_path)
    loaded = DraftModel.from_pretrained(tmp_path)
    assert loaded.config == model.config
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
