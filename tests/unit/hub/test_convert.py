"""Conversion of GGUF files: a tiny one written here, and the real default target."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockdraft.core.errors import ModelError
from blockdraft.hub.catalog import DEFAULT_TARGET, find_drafter
from blockdraft.hub.convert import convert_gguf
from blockdraft.hub.gguf_tokenizer import gguf_tokenizer
from blockdraft.hub.resolve import resolve_model
from tests.tiny_gguf import tensors, write_gguf


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    root = tmp_path_factory.mktemp("convert")
    write_gguf(root / "tiny.gguf")
    convert_gguf(root / "tiny.gguf", root / "tiny")
    return root


@pytest.mark.parametrize(
    ("in_gguf", "in_folder"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.0.attn_v.weight", "model.layers.0.self_attn.v_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_weights_are_what_gguf_itself_dequantizes(converted, in_gguf, in_folder):
    (stored,) = (t for t in gguf.GGUFReader(converted / "tiny.gguf").tensors if t.name == in_gguf)
    expected = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type))
    found = load_file(converted / "tiny" / "model.safetensors")[in_folder]
    assert stored.tensor_type == GGMLQuantizationType.Q4_1
    assert torch.equal(found, expected.to(torch.bfloat16))
    # Near the weights before quantization too, so that both did not fail alike.
    assert np.abs(expected.numpy() - tensors()[in_gguf]).max() < 0.5


def test_config_files_are_plain(converted):
    config = json.loads((converted / "tiny" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"]
    assert "quantization_config" not in config
    # Of two generations of readers: MLX's know only the second.
    assert config["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert config["rope_theta"] == 10000.0
    generation = json.loads((converted / "tiny" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert generation["pad_token_id"] == 2


def test_conversion_is_silent(tmp_path, capfd):
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert capfd.readouterr() == ("", "")


def test_digits_are_single_tokens(converted):
    tokenizer = AutoTokenizer.from_pretrained(converted / "tiny")
    assert tokenizer.convert_ids_to_tokens(tokenizer("2020")["input_ids"]) == ["2", "0", "2", "0"]


def test_unknown_pre_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(ModelError, match="pre-tokenizer 'llama-bpe'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    assert not (tmp_path / "tiny").exists()


def test_a_setting_of_the_tokenizer_that_is_not_followed_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tokenizer={"add_bos_token": True})
    with pytest.raises(ModelError, match="add_bos_token"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")


def test_a_tokenizer_that_lacks_a_part_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", has_merges=False)
    with pytest.raises(ModelError, match="lacks the merges"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")


def test_tokens_are_special_or_the_users_as_the_file_says(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", user_defined=["<tool>"])
    tokenizer = gguf_tokenizer(tmp_path / "tiny.gguf")
    ids = tokenizer("<tool>2<|im_end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<tool>", "2", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool>2"


def check_folder(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    for text in ("café 2024\n\tdef f(x): return x**2  # 日本", " two  spaces ", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "What is 17 + 25?<|im_end|>" in prompt
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()


def test_tiny_folder_loads_without_a_warning(converted):
    check_folder(converted / "tiny")


@pytest.mark.slow
@pytest.mark.model
def test_default_target_loads_without_a_warning():
    folder = resolve_model(DEFAULT_TARGET)
    check_folder(folder)
    assert find_drafter(str(folder)) == find_drafter(DEFAULT_TARGET)
