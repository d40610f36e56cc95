"""Checkpoints that transformers would read as another model, without an error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from blockdraft.core.errors import ModelError
from blockdraft.hub.folder import INDEX_NAME
from blockdraft.models.target.loading import load_target_model
from blockdraft.models.target.stored import check_scheme, check_unpacked, whole_number
from tests.tiny import edit_json, tiny_target, tiny_target_folder

Weights = dict[str, Tensor]
UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.0.up_proj.weight"
BLOCK = 128


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def without(weights: Weights, name: str) -> Weights:
    return {own: weight for own, weight in weights.items() if own != name}


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """fp8 with a scale for each block of 128 x 128, the scales, and what both stand for."""
    shape = [-(-size // BLOCK) for size in weight.shape]
    scales = 2.0 ** torch.arange(-8, shape[0] * shape[1] - 8).view(shape)
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    wide = wide[: weight.shape[0], : weight.shape[1]]
    numbers = (weight.float() / wide).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * wide


def fp8_folder(
    tmp_path: Path, inner: int = 256, scale: str = ".weight_scale_inv"
) -> tuple[Path, Weights]:
    """A folder, and the weights that it stands for. scale: how the names of scales end."""
    sizes = {"hidden_size": 256, "intermediate_size": inner, "head_dim": 64}
    folder, wanted = tiny_target_folder(tmp_path, "qwen3", torch.bfloat16, **sizes), {}

    def packed(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if name.endswith("proj.weight"):
                scales = name.removesuffix(".weight") + scale
                found[name], found[scales], wanted[name] = in_blocks(weight)
            else:
                found[name] = weight
        return found

    rewrite(folder, packed)
    config = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    edit_json(folder / "config.json", quantization_config=config, dtype="bfloat16")
    return folder, wanted


SCALES = [".weight_scale_inv", ".scale", ".qscale_weight"]
"""The last two are DeepSeek-V4's and Mistral's."""


@pytest.mark.parametrize("scale", SCALES)
def test_each_block_has_its_own_scale(scale: str, tmp_path: Path) -> None:
    folder, wanted = fp8_folder(tmp_path, scale=scale)
    found = load_target_model(folder, torch.float32).state_dict()
    assert len(wanted) == 28
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight)


@pytest.mark.parametrize("scale", SCALES)
def test_blocks_that_the_end_of_a_weight_cuts_are_refused(scale: str, tmp_path: Path) -> None:
    """transformers takes two blocks of 96 for 192 numbers, and not one of 128 and one of 64."""
    folder, _ = fp8_folder(tmp_path, 192, scale)
    with pytest.raises(ModelError, match=r"down_proj.weight is \[256, 192\], no multiple of its"):
        load_target_model(folder, torch.float32)


def test_a_single_block_may_be_smaller(tmp_path: Path) -> None:
    folder, wanted = fp8_folder(tmp_path, inner=96)
    found = load_target_model(folder, torch.float32).state_dict()
    assert torch.equal(found[f"{UP}.weight"], wanted[f"{UP}.weight"])


def test_numbers_without_scales_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path)
    lost = f"{UP}.weight_scale_inv"
    rewrite(folder, lambda weights: {k: v for k, v in weights.items() if k != lost})
    with pytest.raises(ModelError, match=f"quantized by fp8.* {UP}.weight has no scales"):
        load_target_model(folder, torch.float32)


def test_only_what_is_read_is_looked_at(tmp_path: Path) -> None:
    """Mistral's folders hold all weights in another form too."""
    folder, wanted = fp8_folder(tmp_path)
    numbers = {"layers.0.attention.wq.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}
    save_file(numbers, folder / "consolidated.safetensors")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    shards, names = ("a.safetensors", "b.safetensors"), sorted(weights)
    for index, shard in enumerate(shards):
        own = {name: weights[name] for name in names[index::2]}
        save_file(own, folder / shard, metadata={"format": "pt"})
    places = {name: shards[index % 2] for index, name in enumerate(names)}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    found = load_target_model(folder, torch.float32).state_dict()
    assert torch.equal(found[f"{UP}.weight"], wanted[f"{UP}.weight"])


def test_an_order_of_groups_that_is_not_followed_is_refused(tmp_path: Path) -> None:
    """Of GPTQ in compressed-tensors: each input has the number of its group."""
    folder, _ = fp8_folder(tmp_path)
    rewrite(folder, lambda weights: {**weights, f"{UP}.weight_g_idx": torch.arange(256)})
    with pytest.raises(ModelError, match=r"weight_g_idx.*transformers does not use it, though"):
        load_target_model(folder, torch.float32)


def scheme(num_bits: int, *targets: str) -> dict[str, object]:
    weights = {"num_bits": num_bits, "type": "int", "strategy": "group", "group_size": 32}
    return {"targets": list(targets), "weights": weights}


def config_of(*groups: dict[str, object], **more: object) -> PretrainedConfig:
    named = {f"group_{index}": group for index, group in enumerate(groups)}
    packed = {"quant_method": "compressed-tensors", "config_groups": named, **more}
    return PretrainedConfig(quantization_config=packed)


def test_layers_that_are_packed_in_several_ways_are_refused(tmp_path: Path) -> None:
    """transformers follows the first one for all layers, and another for experts."""
    attention, mlp, experts = "re:.*attn.*", "re:.*mlp.*", "re:.*mlp.experts.*"
    check_scheme(config_of(scheme(4, attention), scheme(4, mlp)))
    check_scheme(config_of(scheme(4, experts), scheme(8, attention)))
    check_scheme(config_of(scheme(4, "Linear"), {"targets": [attention], "weights": None}))
    with pytest.raises(ValueError, match="all other layers in one way"):
        check_scheme(config_of(scheme(4, attention), scheme(8, mlp)))
    with pytest.raises(ValueError, match="all experts in one way"):
        check_scheme(config_of(scheme(4, experts), scheme(8, "re:.*experts.*down_proj")))
    folder = tiny_target_folder(tmp_path)
    packed = config_of(scheme(4, attention), scheme(8, mlp)).quantization_config
    edit_json(folder / "config.json", quantization_config=packed)
    with pytest.raises(ModelError, match=r"compressed-tensors.*and they have several; or give"):
        load_target_model(folder, torch.float32)


@pytest.mark.parametrize("order", [True, "group", "dynamic"])
def test_an_order_of_groups_that_the_config_names_is_refused(order: object) -> None:
    ordered: dict[str, Any] = scheme(4, "Linear")
    ordered["weights"]["actorder"] = "weight"  # it is in the weights already
    check_scheme(config_of(ordered))
    ordered["weights"]["actorder"] = order
    with pytest.raises(ValueError, match="order of its groups"):
        check_scheme(config_of(ordered))


def test_rotated_inputs_are_refused() -> None:
    rotation = {"config_groups": {"R3": {"type": "hadamard"}}}
    with pytest.raises(ValueError, match="leaves out its transform_config"):
        check_scheme(config_of(scheme(4, "Linear"), transform_config=rotation))
    check_scheme(config_of(scheme(4, "Linear"), transform_config={}))


def test_experts_with_a_scale_for_all_of_a_weight_are_refused(tmp_path: Path) -> None:
    """NVFP4: their blocks have scales too, and transformers takes these alone."""
    name = "model.layers.0.mlp.experts.3.up_proj.weight_global_scale"
    save_file({name: torch.ones(1)}, tmp_path / "model.safetensors")
    config = config_of(scheme(4, "Linear"))
    check_unpacked(tmp_path, config, tiny_target("qwen3"))
    with pytest.raises(ValueError, match=f"transformers leaves out {name}"):
        check_unpacked(tmp_path, config, tiny_target("qwen3_moe"))


@pytest.mark.parametrize("module", [UP, "model.norm", "lm_head"])
def test_a_bias_for_which_there_is_no_place_is_refused(module: str, tmp_path: Path) -> None:
    """Its config leaves out a setting, and transformers the bias."""
    folder = tiny_target_folder(tmp_path)
    rewrite(folder, lambda weights: {**weights, f"{module}.bias": torch.zeros(96)})
    load_target_model(folder, torch.float32)
    rewrite(folder, lambda weights: {**weights, f"{module}.bias": torch.ones(96)})
    with pytest.raises(ModelError, match=rf"holds {module}.bias, for which Llama.* has no place"):
        load_target_model(folder, torch.float32)


def test_what_belongs_to_no_layer_is_left_out(tmp_path: Path) -> None:
    """Older folders hold the frequencies of rotations, others heads for training."""
    folder = tiny_target_folder(tmp_path)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    more["value_head.bias"] = torch.ones(1)
    rewrite(folder, lambda weights: {**weights, **more})
    load_target_model(folder, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool], ids=str)
def test_whole_numbers_that_stand_for_others_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Without a scale and a method: transformers would multiply with them."""
    folder = tiny_target_folder(tmp_path)
    rewrite(folder, lambda weights: {**weights, f"{UP}.weight": weights[f"{UP}.weight"].to(dtype)})
    with pytest.raises(ModelError, match=rf"holds {UP}.weight in whole numbers, .*; give the"):
        load_target_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("kind", "own", "stored"),
    [
        ("llama", f"{UP}.weight", UP.removeprefix("model.") + ".weight"),
        ("qwen3_moe", EXPERT, EXPERT),
    ],
)
def test_whole_numbers_are_refused_by_any_name(
    kind: str, own: str, stored: str, tmp_path: Path
) -> None:
    """transformers adds what the names in older folders lack, and joins experts."""
    folder = tiny_target_folder(tmp_path, kind)
    numbers = {
        stored: torch.ones(load_file(folder / "model.safetensors")[own].shape).to(torch.int8)
    }
    rewrite(folder, lambda weights: {**without(weights, own), **numbers})
    with pytest.raises(ModelError, match=rf"holds {stored} in whole numbers"):
        load_target_model(folder, torch.float32)


def test_whole_numbers_that_the_model_does_not_use_are_left_out(tmp_path: Path) -> None:
    """Such as masks, which older folders hold, and layers for images."""
    folder = tiny_target_folder(tmp_path)
    names = ("model.layers.0.self_attn.bias", "position_ids", "vision_tower.proj.weight")
    more = {name: torch.ones(2, 2, dtype=torch.uint8) for name in names}
    rewrite(folder, lambda weights: {**weights, **more})
    load_target_model(folder, torch.float32)


def test_a_model_of_its_own_code_may_hold_whole_numbers(tmp_path: Path) -> None:
    """As a parameter or as a buffer, with scales that it multiplies them by itself."""
    folder, model = tiny_target_folder(tmp_path), tiny_target()
    numbers = torch.ones(2, 2, dtype=torch.int8)
    packed = model.get_submodule(UP)
    packed.weight = nn.Parameter(numbers, requires_grad=False)
    rewrite(folder, lambda weights: {**weights, f"{UP}.weight": numbers})
    assert whole_number(folder, set(), model) is None
    del packed.weight
    packed.register_buffer("weight", numbers)
    assert whole_number(folder, set(), model) is None


def in_another_form(folder: Path) -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def test_weights_in_another_form_are_loaded_or_refused(tmp_path: Path) -> None:
    folder = tiny_target_folder(tmp_path)
    wanted = load_target_model(folder, torch.float32).state_dict()
    in_another_form(folder)
    found = load_target_model(folder, torch.float32).state_dict()
    assert all(torch.equal(found[name], own) for name, own in wanted.items())
    folder, _ = fp8_folder(tmp_path / "fp8")
    in_another_form(folder)
    with pytest.raises(ModelError, match="its scales cannot be checked, since no safetensors"):
        load_target_model(folder, torch.float32)
