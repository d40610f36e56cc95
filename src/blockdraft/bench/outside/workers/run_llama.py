"""llama.cpp, as xllamacpp brings it: plain, with its own n-grams of the text, or with DFlash."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import gguf  # of another environment
import numpy as np
import xllamacpp  # type: ignore[import-not-found]
from talk import Decode, Settings, serve  # type: ignore[import-not-found]  # beside this script

METHODS = {
    "plain": "COMMON_SPECULATIVE_TYPE_NONE",
    "ngram": "COMMON_SPECULATIVE_TYPE_NGRAM_MOD",
    "dflash": "COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH",
}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
DRAFT_LAYER = {**LAYER, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
DRAFT_ENDS = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The weights of a folder in bfloat16, as their bits: numpy has no such type."""
    found = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with path.open("rb") as file:
            head = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            begin = file.tell()
        for name, entry in head.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{path} holds {entry['dtype']}, and only BF16 is converted")
            first, last = entry["data_offsets"]
            found[name] = np.memmap(
                path, np.uint16, "r", begin + first, ((last - first) // 2,)
            ).reshape(entry["shape"])
    return found


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows in the order in which llama.cpp rotates them: pairs side by side."""
    shape = (num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return rows.reshape(shape).swapaxes(1, 2).reshape(rows.shape)


def convert(folder: Path, path: Path, eos_ids: list[int]) -> None:
    """Write a model of Llama's layout as GGUF, its matrices bit for bit.

    Raises:
        ValueError: it has another layout.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama" or is_scaled(config):
        raise ValueError("only targets of Llama's layout without RoPE scaling are converted")
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    writer = writer_of(path, "llama", config)
    add_tokenizer(writer, folder, config["vocab_size"], eos_ids)
    for name, bits in read_tensors(folder).items():
        new = new_name(name, ENDS, LAYER)
        kind = new.rpartition(".")[2]
        add_tensor(writer, new, interleaved(bits, heads[kind]) if kind in heads else bits)
    write(writer)


def convert_drafter(folder: Path, target: Path, path: Path, eos_ids: list[int]) -> None:
    """Write a DFlash drafter as GGUF. It has its target's tokenizer, embedding and head.

    Raises:
        ValueError: it has what is not converted.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= config.get("dflash_config") or {}
    scales = {"final_logit_softcapping", "input_embedding_scale", "output_multiplier"}
    kinds = {"full_attention", *config.get("layer_types", [])}
    is_causal = config.get("is_causal") or config.get("causal")
    if scales & config.keys() or is_scaled(config) or len(kinds) > 1 or is_causal:
        raise ValueError(
            "only DFlash drafters with full attention and without RoPE scaling or scaled "
            "embeddings or logits are converted"
        )
    writer = writer_of(path, "dflash", config)
    writer.add_causal_attention(False)
    # llama.cpp counts the inputs of layers, a checkpoint their outputs.
    layers = [number + 1 for number in config["target_layer_ids"]]
    writer.add_array("dflash.target_layers", layers)
    writer.add_uint32("dflash.block_size", config["block_size"])
    writer.add_mask_token_id(config["mask_token_id"])
    add_tokenizer(writer, target, config["vocab_size"], eos_ids)
    for name, bits in read_tensors(folder).items():
        add_tensor(writer, new_name(name, DRAFT_ENDS, DRAFT_LAYER), bits)
    write(writer)


def is_scaled(config: dict[str, Any]) -> bool:
    """Whether the rotations of a model are scaled."""
    rotations = config.get("rope_parameters") or config
    return bool(config.get("rope_scaling")) or rotations.get("rope_type", "default") != "default"


def writer_of(path: Path, architecture: str, config: dict[str, Any]) -> Any:
    """A GGUF file with the sizes of a model."""
    rotations = config.get("rope_parameters") or config
    num_heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // num_heads
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(rotations["rope_theta"]))
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    return writer


def new_name(name: str, ends: dict[str, str], layer: dict[str, str]) -> str:
    """What llama.cpp calls a tensor.

    Raises:
        ValueError: it has no such tensor.
    """
    stem = name.removesuffix(".weight")
    if stem in ends:
        return ends[stem]
    _, _, rest = stem.partition("layers.")
    number, _, kind = rest.partition(".")
    if kind not in layer:
        raise ValueError(f"{name} is of another layout")
    return f"blk.{number}.{layer[kind]}"


def add_tensor(writer: Any, name: str, bits: np.ndarray) -> None:
    """Add a weight in bfloat16 by its bits; norms in float32, which llama.cpp wants."""
    if bits.ndim == 1:
        writer.add_tensor(f"{name}.weight", (bits.astype(np.uint32) << 16).view(np.float32))
    else:
        raw = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def write(writer: Any) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: Any, folder: Path, vocab_size: int, eos_ids: list[int]) -> None:
    """The tokens: prompts come as their ids, and answers leave so, but llama.cpp wants texts."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    texts |= special
    kinds = [
        gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL
        for number in range(vocab_size)
    ]
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in tokenizer["model"]["merges"]
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([texts.get(number, f"[unused{number}]") for number in range(vocab_size)])
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    if eos_ids:
        writer.add_eos_token_id(eos_ids[0])


def add_drafter(params: Any, settings: Settings, path: Path) -> None:
    """Convert the drafter into this file, and draft with it."""
    convert_drafter(Path(settings["drafter"]), Path(settings["target"]), path, settings["eos_ids"])
    draft = params.speculative.draft
    draft.mparams.path = str(path)
    draft.n_max = settings["num_draft_tokens"]
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = settings["threads"]
    draft.n_gpu_layers = params.n_gpu_layers


def load(settings: Settings) -> Decode:
    """Load the target's GGUF file, or what its weights are converted to."""
    with tempfile.TemporaryDirectory() as folder:
        path = settings["gguf"]
        if path is None:
            path = str(Path(folder) / "target.gguf")
            convert(Path(settings["target"]), Path(path), settings["eos_ids"])
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = settings["max_context"]
        params.n_parallel = 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.port = 0  # any that is free
        if settings["device"] == "cpu":
            params.n_gpu_layers = 0
        params.cache_prompt = False
        params.verbosity = 0
        kind = getattr(xllamacpp.common_speculative_type, METHODS[settings["method"]])
        params.speculative.types = [kind]
        if settings["method"] == "dflash":
            add_drafter(params, settings, Path(folder) / "drafter.gguf")
        server = xllamacpp.Server(params)  # which has read the file
    opener = build_opener(ProxyHandler({}))  # no proxy reaches this machine's own ports

    def decode(prompt_ids: list[int], max_tokens: int) -> dict[str, Any]:
        asked = {
            "prompt": prompt_ids,
            "n_predict": max_tokens,
            "samplers": ["top_k"],
            "top_k": 1,
            "cache_prompt": False,
            "return_tokens": True,
        }
        # By its own route: the bindings' calls give texts without their tokens.
        request = Request(f"{server.listening_address}/completion", json.dumps(asked).encode())
        start = time.perf_counter()
        with opener.open(request) as response:
            answer = json.load(response)
        total = time.perf_counter() - start
        timings = answer["timings"]
        return {
            "token_ids": answer["tokens"],
            "total_seconds": total,
            "decode_seconds": timings["predicted_ms"] / 1e3,
            # Each pass gives the accepted drafts and one token more.
            "num_passes": len(answer["tokens"]) - timings.get("draft_n_accepted", 0),
        }

    return decode


if __name__ == "__main__":
    serve(load, ("xllamacpp", "gguf"))
