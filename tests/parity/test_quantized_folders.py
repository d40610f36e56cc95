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

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.cache.pages import Pages
from blockdraft.core.errors import ModelError
from blockdraft.core.request import SamplingParams
from blockdraft.models.target.loading import load_target_model
from blockdraft.models.target.paged import PagedTarget
from tests.crowd import Request, run_alone, run_crowd
from tests.fakes import NoisyOracleDrafter
from tests.parity.test_wrappers import write_wrapper
from tests.tiny import TEXT_VOCAB_SIZE, edit_json, tiny_target, tiny_target_folder

Weights = dict[str, Tensor]


def rewrite(folder: Path, change: Callable[[Weights], Weights], **config: object) -> None:
    """Other weights, and the config that says how they are packed."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=config, dtype="bfloat16")


def mxfp4_folder(tmp_path: Path) -> Path:
    """gpt-oss as published: experts in blocks of 32 numbers of four bits with a scale each."""
    folder = tiny_target_folder(tmp_path, "gpt_oss", torch.bfloat16, intermediate_size=64)
    generator = torch.Generator().manual_seed(0)

    def packed(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                found[name] = weight
                continue
            experts, inputs, outputs = weight.shape
            shape = (experts, outputs, inputs // 32)
            found[f"{name}_blocks"] = torch.randint(
                256, (*shape, 16), generator=generator, dtype=torch.uint8
            )
            found[f"{name}_scales"] = torch.randint(
                121, 125, shape, generator=generator, dtype=torch.uint8
            )
        return found

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    rewrite(folder, packed, quant_method="mxfp4", modules_to_not_convert=kept)
    return folder


def fp8_folder(tmp_path: Path) -> Path:
    """Linear layers in eight bits with a scale for each block of 128 x 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    folder = tiny_target_folder(tmp_path, "qwen3", torch.bfloat16, **sizes)

    def packed(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if not name.endswith("proj.weight"):
                found[name] = weight
                continue
            scale = weight.float().abs().max() / 448
            found[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
            shape = [-(-size // 128) for size in weight.shape]
            found[f"{name}_scale_inv"] = scale.expand(shape).contiguous()
        return found

    rewrite(folder, packed, quant_method="fp8", weight_block_size=[128, 128])
    return folder


def compressed_folder(tmp_path: Path, num_bits: int) -> Path:
    """Linear layers in whole numbers, groups of 32 inputs with a scale each, packed into int32."""
    pytest.importorskip("compressed_tensors", reason="reads these checkpoints")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    folder = tiny_target_folder(tmp_path, "qwen3", torch.bfloat16)
    largest = 2 ** (num_bits - 1) - 1

    def packed(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if not name.endswith("proj.weight"):
                found[name] = weight
                continue
            groups = weight.float().unflatten(1, (-1, 32))
            scales = groups.abs().amax(-1, keepdim=True) / largest
            numbers = (groups / scales).round().clamp(-largest, largest).to(torch.int8)
            found[f"{name}_packed"] = pack_to_int32(numbers.flatten(1), num_bits)
            found[f"{name}_scale"] = scales[..., 0].to(torch.bfloat16)
            found[f"{name}_shape"] = torch.tensor(weight.shape)
        return found

    args = {"num_bits": num_bits, "type": "int", "symmetric": True}
    args |= {"strategy": "group", "group_size": 32}
    rewrite(
        folder,
        packed,
        quant_method="compressed-tensors",
        format="pack-quantized",
        quantization_status="compressed",
        config_groups={"group_0": {"targets": ["Linear"], "weights": args}},
        ignore=["lm_head"],
    )
    return folder


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

    def packed(weights: Weights) -> Weights:
        found: Weights = {}
        for name, weight in weights.items():
            if not name.endswith("proj.weight"):
                found[name] = weight
                continue
            groups = weight.float().unflatten(1, (-1, 32))
            scales = groups.abs().amax(-1, keepdim=True) / 7
            numbers = ((groups / scales).round() + 8).flatten(1)
            zeros = torch.full(groups.shape[:2], 8)
            layer = name.removesuffix("weight")
            found[f"{layer}scales"] = scales[..., 0].T.to(torch.float16).contiguous()
            if method == "gptq":
                found[f"{layer}qweight"] = words_of(numbers).T.contiguous()
                # One less than it is: so the first version of the format has it.
                found[f"{layer}qzeros"] = words_of(zeros.T - 1)
                found[f"{layer}g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // 32
            else:
                found[f"{layer}qweight"] = words_of(numbers.T, AWQ_ORDER)
                found[f"{layer}qzeros"] = words_of(zeros.T, AWQ_ORDER)
        return found

    own = {
        "gptq": {"desc_act": False, "sym": True, "checkpoint_format": "gptq"},
        "awq": {"version": "gemm", "zero_point": True},
    }[method]
    rewrite(folder, packed, quant_method=method, bits=4, group_size=32, **own)
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
        assert run_crowd(target, drafter, requests, known=known).answers == alone
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
    path = tmp_path / "model.safetensors"
    found: Weights = {}
    for name, weight in load_file(path).items():
        if ".mlp.experts." not in name:
            found[name] = weight.float()
            continue
        # All numbers are -1, 0 and 1 steps of an eighth, so nothing is rounded.
        numbers = weight.sign().to(torch.int8)
        found[f"{name}_packed"] = pack_to_int32(numbers, 4)
        found[f"{name}_scale"] = torch.full((len(weight), weight.shape[1] // 32), 0.125)
        found[f"{name}_shape"] = torch.tensor(weight.shape)
    save_file(found, path, metadata={"format": "pt"})
    args = {"num_bits": 4, "type": "int", "symmetric": True}
    args |= {"strategy": "group", "group_size": 32}
    packed = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    }
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config={**text, "quantization_config": packed})
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
    path = folder / "model.safetensors"
    found: Weights = {}
    for name, weight in load_file(path).items():
        if not (part in name and name.endswith("proj.weight")):
            found[name] = weight
            continue
        scale = weight.float().abs().max() / 448
        found[name] = (weight.float() / scale).to(torch.float8_e4m3fn)
        found[f"{name}_scale"] = scale
        found[name.replace("weight", "input_scale")] = torch.tensor(1.0)
    save_file(found, path, metadata={"format": "pt"})
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
