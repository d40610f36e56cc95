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
from blockdraft.hub.resolve import resolve_model

WIDTH, INNER, HEADS = 64, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + ' ' + m['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the 256 characters that stand for the bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in plain] + [chr(256 + n) for n in range(256 - len(plain))]


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)

    def matrix(rows, columns):
        return random.standard_normal((rows, columns), dtype=np.float32)

    names = {f"attn_{n}": matrix(WIDTH, WIDTH) for n in ("q", "k", "v", "output")}
    names |= {"ffn_gate": matrix(INNER, WIDTH), "ffn_up": matrix(INNER, WIDTH)}
    names |= {"ffn_down": matrix(WIDTH, INNER)}
    names |= {n: np.ones(WIDTH, np.float32) for n in ("attn_norm", "ffn_norm")}
    block = {f"blk.0.{name}.weight": value for name, value in names.items()}
    vocabulary = len(SPECIAL) + 256 + 1
    outer = {"token_embd.weight": matrix(vocabulary, WIDTH)}
    return outer | block | {"output_norm.weight": np.ones(WIDTH, np.float32)}


def write_gguf(path, pre_tokenizer="smollm"):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    tokens = [*SPECIAL, *byte_alphabet(), "20"]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["2 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, value in tensors().items():
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            quantized = gguf.quants.quantize(value, GGMLQuantizationType.Q4_1)
            writer.add_tensor(name, quantized, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


@pytest.mark.model
def test_default_target_loads_without_a_warning():
    folder = resolve_model(DEFAULT_TARGET)
    check_folder(folder)
    assert find_drafter(str(folder)) == find_drafter(DEFAULT_TARGET)
