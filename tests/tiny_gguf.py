"""A tiny GGUF file with random weights and a byte-level tokenizer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
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


def tensors() -> dict[str, Matrix]:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Matrix:
        return random.standard_normal((rows, columns), dtype=np.float32)

    names = {f"attn_{n}": matrix(WIDTH, WIDTH) for n in ("q", "k", "v", "output")}
    names |= {"ffn_gate": matrix(INNER, WIDTH), "ffn_up": matrix(INNER, WIDTH)}
    names |= {"ffn_down": matrix(WIDTH, INNER)}
    names |= {n: np.ones(WIDTH, np.float32) for n in ("attn_norm", "ffn_norm")}
    block = {f"blk.0.{name}.weight": value for name, value in names.items()}
    vocabulary = len(SPECIAL) + 256 + 1
    outer = {"token_embd.weight": matrix(vocabulary, WIDTH)}
    return outer | block | {"output_norm.weight": np.ones(WIDTH, np.float32)}


def write_gguf(
    path: Path,
    pre_tokenizer: str = "smollm",
    *,
    architecture: str = "llama",
    kinds: Mapping[str, Kind] = MappingProxyType({}),
    without: str = "",
    header: Mapping[str, str | int | float] = MappingProxyType({}),
    more: Mapping[str, Matrix] = MappingProxyType({}),
    tokenizer: Mapping[str, bool] = MappingProxyType({}),
    user_defined: Sequence[str] = (),
    has_merges: bool = True,
    more_fields: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """A model of one layer.

    kinds: of tensors that are not in Q4_1; without: one to leave out; more: tensors; header: what
    else it says, behind the name of its architecture; tokenizer: and of its tokenizer;
    user_defined: more tokens; has_merges: a tokenizer is not whole without them; more_fields: of
    the file, by their whole names.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    tokens = [*SPECIAL, *byte_alphabet(), "20", *user_defined]
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257 + [4] * len(user_defined))
    if has_merges:
        writer.add_token_merges(["2 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, setting in header.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(setting)](f"{architecture}.{name}", setting)
    for name, number in more_fields.items():
        writer.add_uint16(name, number)
    for name, flag in tokenizer.items():
        writer.add_bool(f"tokenizer.ggml.{name}", flag)
    for name, value in {**tensors(), **more}.items():
        if name == without:
            continue
        if value.ndim == 1:
            writer.add_tensor(name, value)
        else:
            kind = kinds.get(name, Kind.Q4_1)
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
