"""Folders whose weights others packed, as transformers loads them.

It unpacks mxfp4 (gpt-oss) and fp8 (Qwen3-FP8) where no kernel reads them. What needs a
package of its own, compressed-tensors, GPTQ and AWQ, is tested where that is installed. Packed
bitsandbytes weights were run by hand; a package that is missing is named.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.loading import load_target_model
from blockdraft.models.target.paged import PagedTarget
from tests.batched import Request, run_alone, run_batched
from tests.fakes import NoisyOracleDrafter
from tests.parity.test_wrappers import write_wrapper
from tests.tiny import TEXT_VOCAB_SIZE, edit_json, tiny_target, tiny_target_folder

Weights = dict[str, Tensor]


def pack(
    folder: Path,
    packed: Callable[[str, Tensor], Weights],
    is_packed: Callable[[str], bool] = lambda name: name.endswith("proj.weight"),
) -> None:
    """Put what `packed` makes of some weights in their place; usually of all linear layers."""
    path = folder / "model.safetensors"
    found: Weights = {}
    for name, weight in load_file(path).items():
        found |= packed(name, weight) if is_packed(name) else {name: weight}
    save_file(found, path, metadata={"format": "pt"})


def tell(folder: Path, **config: object) -> None:
    """Let the config say how weights are packed."""
    edit_json(folder / "config.json", quantization_config=config, dtype="bfloat16")


def mxfp4_folder(tmp_path: Path) -> Path:
    """gpt-oss as published: experts in blocks of 32 numbers of four bits with a scale each."""
    folder = tiny_target_folder(tmp_path, "gpt_oss", torch.bfloat16, intermediate_size=64)
    generator = torch.Generator().manual_seed(0)

    def packed(name: str, weight: Tensor) -> Weights:
        experts, inputs, outputs = weight.shape
        shape = (experts, outputs, inputs // 32)
        kind = {"generator": generator, "dtype": torch.uint8}
        return {
            f"{name}_blocks": torch.randint(256, (*shape, 16), **kind),
            f"{name}_scales": torch.randint(121, 125, shape, **kind),
        }

    pack(folder, packed, lambda name: name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    tell(folder, quant_method="mxfp4", modules_to_not_convert=kept)
    return folder


def in_eight_bits(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of a weight, and the one scale of all of them."""
    scale = weight.float().abs().max() / 448
    return (weight.float() / scale).to(torch.float8_e4m3fn), scale


def fp8_folder(tmp_path: Path) -> Path:
    """Linear layers in eight bits with a scale for each block of 128 x 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = tiny_target_folder(tmp_path, "qwen3", torch.bfloat16, **sizes)

    def packed(name: str, weight: Tensor) -> Weights:
        numbers, scale = in_eight_bits(weight)
        shape = [-(-size // 128) for size in weight.shape]
        return {name: numbers, f"{name}_scale_inv": scale.expand(shape).contiguous()}

    pack(folder, packed)
    tell(folder, quant_method="fp8", weight_block_size=[128, 128])
    return folder


def compressed_folder(tmp_path: Path, num_bits: int) -> Path:
    """Linear layers in whole numbers, groups of 32 inputs with a scale each, packed into int32."""
    pytest.importorskip("compressed_tensors", reason="reads these checkpoints")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    folder = tiny_target_folder(tmp_path, "qwen3", torch.bfloat16)
    largest = 2 ** (num_bits - 1) - 1

    def packed(name: str, weight: Tensor) -> Weights:
        groups = weight.float().unflatten(1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / largest
        numbers = (groups / scales).round().clamp(-largest, largest).to(torch.int8)
        return {
            f"{name}_packed": pack_to_int32(numbers.flatten(1), num_bits),
            f"{name}_scale": scales[..., 0].to(torch.bfloat16),
            f"{name}_shape": torch.tensor(weight.shape),
        }

    pack(folder, packed)
    tell(folder, **compressed_config(num_bits, ignore=["lm_head"]))
    return folder


def compressed_config(num_bits: int, ignore: list[str]) -> dict[str, Any]:
    """What compressed-tensors writes of linear layers in groups of 32."""
    args = {"num_bits": num_bits, "type": "int", "symmetric": True}
    args |= {"strategy": "group", "group_size": 32}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        "ignore": ignore,
    }


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of the columns in a word of AWQ, from its lowest bits on; in GPTQ they follow each other."""


GPTQ_WARNS = [
    # Its packages look at every attribute of a model, and leave a temporary folder to Python.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def words_of(numbers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Numbers of four bits [.., 8 n] in words of 32 [.., n]."""
    columns = numbers.to(torch.int64).unflatten(-1, (-1, 8))
    words = sum((columns[..., column] << 4 * place for place, column in enumerate(order)), 0)
    return torch.as_tensor(words).to(torch.int32).contiguous()


def four_bit_folder(tmp_path: Path, method: str) -> Path:
    """Linear layers in numbers of four bits, groups of 32 inputs with a scale and a zero each."""
    pytest.importorskip("gptqmodel", reason="reads these checkpoints")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = tiny_target_folder(tmp_path, "qwen3", torch.float16, **sizes)

    def packed(name: str, weight: Tensor) -> Weights:
        groups = weight.float().unflatten(1, (-1, 32))
        scales = groups.abs().amax(-1, keepdim=True) / 7
        numbers = ((groups / scales).round() + 8).flatten(1)
        zeros = torch.full(groups.shape[:2], 8)
        found = {"scales": scales[..., 0].T.to(torch.float16).contiguous()}
        if method == "gptq":
            found["qweight"] = words_of(numbers).T.contiguous()
            # One less than it is: so the first version of the format has it.
            found["qzeros"] = words_of(zeros.T - 1)
            found["g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // 32
        else:
            found["qweight"] = words_of(numbers.T, AWQ_ORDER)
            found["qzeros"] = words_of(zeros.T, AWQ_ORDER)
        return {name.removesuffix("weight") + part: tensor for part, tensor in found.items()}

    own = {
        "gptq": {"desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        "awq": {"version": "gemm", "zero_point": True},
    }[method]
    pack(folder, packed)
    tell(folder, quant_method=method, bits=4, group_size=32, **own)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "write",
    [
        mxfp4_folder,
        fp8_folder,
        partial(compressed_folder, num_bits=8),
        partial(compressed_folder, num_bits=4),
        pytest.param(partial(four_bit_folder, method="gptq"), marks=GPTQ_WARNS),
        partial(four_bit_folder, method="awq"),
    ],
    ids=["mxfp4", "fp8", "compressed-int8", "compressed-int4", "gptq", "awq"],
)
def test_drafted_equals_plain(
    write: Callable[[Path], Path], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = load_target_model(write(tmp_path), dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    prompts = [tuple(range(5, 75)), (8, 3, 20), (*range(5, 69), 7)]
    requests = [
        Request(prompt, SamplingParams(max_tokens=24, logprobs=0), arrival=3 * index)
        for index, prompt in enumerate(prompts)
    ]
    with PagedTarget(model, Pages(20)).released_after() as target:
        target.check_row_invariance()
        alone = run_alone(target, requests)
        drafter = NoisyOracleDrafter(15, TEXT_VOCAB_SIZE, seed=3)
        known = [answer.token_ids for answer in alone]
        assert run_batched(target, drafter, requests, known=known).answers == alone
    assert len({token for answer in alone for token in answer.token_ids}) >= 8


@pytest.mark.parametrize("num_bits", [4, 8])
def test_packed_weights_are_unpacked_as_they_were_written(num_bits: int, tmp_path: Path) -> None:
    folder = compressed_folder(tmp_path, num_bits)
    stored = load_file(folder / "model.safetensors")
    model = load_target_model(folder, torch.float32)
    original = tiny_target("qwen3", torch.bfloat16, vocab_size=TEXT_VOCAB_SIZE)
    name = "model.layers.1.mlp.up_proj.weight"
    found, wanted = model.state_dict()[name], original.state_dict()[name].float()
    steps = stored[f"{name}_scale"].float().repeat_interleave(32, 1)
    # Half a step, and what the scale lost in bfloat16, of up to the largest number.
    assert ((found - wanted).abs() <= steps * (0.5 + 2 ** (num_bits - 9)) + 1e-6).all()
    assert not torch.equal(found, wanted)


def test_a_part_for_text_that_is_packed_alone_is_unpacked(tmp_path: Path) -> None:
    """Kimi-K2.5: its config says so inside `text_config`, and only experts are packed."""
    pytest.importorskip("compressed_tensors", reason="reads these checkpoints")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    write_wrapper(tmp_path, "Kimi_K25", moe_intermediate_size=32)

    def packed(name: str, weight: Tensor) -> Weights:
        if ".mlp.experts." not in name:
            return {name: weight.float()}
        # All numbers are -1, 0 and 1 steps of an eighth, so nothing is rounded.
        return {
            f"{name}_packed": pack_to_int32(weight.sign().to(torch.int8), 4),
            f"{name}_scale": torch.full((len(weight), weight.shape[1] // 32), 0.125),
            f"{name}_shape": torch.tensor(weight.shape),
        }

    pack(tmp_path, packed, lambda name: True)
    own = compressed_config(4, ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"])
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config={**text, "quantization_config": own})
    model = load_target_model(tmp_path, torch.float32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    experts = [p for name, p in model.named_parameters() if ".mlp.experts." in name]
    assert experts
    for expert in experts:
        assert set(expert.unique().tolist()) == {-0.125, 0.125}


def scaled_folder(tmp_path: Path, kind: str = "qwen3", part: str = "") -> Path:
    """Linear layers in eight bits with one scale each, as NVIDIA's ModelOpt writes them.

    part: of the names of those that are packed.
    """
    folder = tiny_target_folder(tmp_path, kind, torch.bfloat16)

    def packed(name: str, weight: Tensor) -> Weights:
        numbers, scale = in_eight_bits(weight)
        input_scale = {name.replace("weight", "input_scale"): torch.tensor(1.0)}
        return {name: numbers, f"{name}_scale": scale, **input_scale}

    pack(folder, packed, lambda name: part in name and name.endswith("proj.weight"))
    return folder


@pytest.mark.parametrize(("kind", "part"), [("qwen3", ""), ("qwen3_moe", ".experts.")])
def test_scaled_weights_are_refused_where_the_config_says_nothing_of_it(
    kind: str, part: str, tmp_path: Path
) -> None:
    """Older folders say it in hf_quant_config.json alone, which transformers does not read."""
    folder = scaled_folder(tmp_path, kind, part)
    with pytest.raises(ModelError, match=r"_scale: its weights are quantized, and its config"):
        load_target_model(folder, torch.float32)


def test_a_method_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    """It would leave out the scales."""
    folder = scaled_folder(tmp_path)
    config = {"quant_method": "modelopt", "quant_algo": "FP8"}
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(ModelError, match=r"quantized by modelopt.* does not know this method"):
        load_target_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("config", "package"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "gptqmodel"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptqmodel|optimum"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed.tensors"),
    ],
    ids=["awq", "gptq", "bitsandbytes", "compressed-tensors"],
)
def test_a_package_that_is_missing_is_named(
    config: dict[str, object], package: str, tmp_path: Path
) -> None:
    if find_spec(package.split("|")[0].replace(".", "_")) is not None:
        pytest.skip("it is installed")
    folder = tiny_target_folder(tmp_path)
    edit_json(folder / "config.json", quantization_config=config)
    reason = f"(?i)quantized by {config['quant_method']}.*{package}"
    with pytest.raises(ModelError, match=reason) as error:
        load_target_model(folder, torch.float32)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("or give the model's full-precision weights with --quantize")
