"""Turn a GGUF file into a Hugging Face folder: config, bfloat16 safetensors, tokenizer."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.utils import logging as transformers_logging

from blockdraft.core.errors import ModelError
from blockdraft.core.files import replace_file
from blockdraft.hub.gguf_tokenizer import gguf_tokenizer

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Of files that run as they are, in llama.cpp's names; Mistral's is llama too."""

_READ = {
    *("context_length", "block_count", "feed_forward_length", "embedding_length", "vocab_size"),
    *("attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
    *("rope.dimension_count", "rope.freq_base"),
    # By transformers up to here, and these by `_complete`.
    *("attention.key_length", "attention.value_length", "rope.scaling.type"),
    *("rope.scaling.factor", "rope.scaling.original_context_length"),
    # They say how the model was made.
    *("rope.scaling.finetuned", "tensor_data_layout"),
}
"""What is read of a file's header, behind the name of its architecture."""
_NEUTRAL: dict[str, object] = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scale_linear": 1.0,
    "attention.causal": True,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
}
"""What else may be there with these values, which change nothing."""
_ENDS = ("eos", "eot", "eom")
"""The tokens of a header that end a text, a turn or a message; a tokenizer has one of them."""


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, which is made here.

    Weights are dequantized to float32 and rounded to bfloat16. Killed halfway, this leaves a part
    of a folder: give it a temporary one and rename that.

    Raises:
        ModelError: see `gguf_tokenizer`.
    """
    tokenizer = gguf_tokenizer(path)
    folder.mkdir()
    with _silence():
        _save_tokenizer(tokenizer, folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            trust_remote_code=False,
        )
        _save_model(model, folder)


def describe_gguf(path: Path, folder: Path) -> None:
    """Write config and tokenizer of a GGUF file into `folder`, which is made here; no weights.

    A `tokenizer.json` beside the file comes before the file's own vocabulary.

    Raises:
        ModelError: the file's architecture or something else in its header that changes the
            computation is not known here; it is a part of a model; the tokenizer beside it is
            another model's; or see `gguf_tokenizer`.
    """
    architecture = _field(path, "general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{path.name} holds a model of architecture {architecture!r}, and only "
            f"{', '.join(ARCHITECTURES)} run as they are; use the model's original Hugging Face "
            "folder with --quantize"
        )
    if (num_parts := _field(path, "split.count") or 1) > 1:
        raise ModelError(
            f"{path.name} is one of {num_parts} parts of a model, and only complete files are "
            "read; join them with `llama-gguf-split --merge` of llama.cpp"
        )
    with _silence():
        if (path.parent / "tokenizer.json").is_file():
            tokenizer = _tokenizer_beside(path)
        else:
            tokenizer = gguf_tokenizer(path)
        folder.mkdir()
        _save_tokenizer(tokenizer, folder, _ends(path))
        config = AutoConfig.from_pretrained(
            path.parent, gguf_file=path.name, trust_remote_code=False
        )
        _complete(config, path, _header(path, architecture))
        _save_config(config, MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__, folder)


def _tokenizer_beside(path: Path) -> Any:
    """The tokenizer whose files lie beside a GGUF file; without a chat template it has the file's.

    Raises:
        ModelError: it is another model's: more than a tenth of the tokens differ.
    """
    tokenizer = AutoTokenizer.from_pretrained(path.parent, trust_remote_code=False)
    known: list[str] = _field(path, "tokenizer.ggml.tokens") or []
    known = known[: len(tokenizer)]
    found = tokenizer.convert_ids_to_tokens(list(range(len(known))))
    differing = [pair for pair in zip(found, known, strict=True) if pair[0] != pair[1]]
    if len(differing) > len(known) / 10:
        other, own = differing[0]
        raise ModelError(
            f"the tokenizer.json beside {path.name} does not belong to the model: {len(differing)} "
            f"tokens differ, and the first is {other!r} instead of {own!r}; put the model's own "
            "there"
        )
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _field(path, "tokenizer.chat_template")
    return tokenizer


def _ends(path: Path) -> list[int]:
    fields = gguf.GGUFReader(path).fields
    names = [f"tokenizer.ggml.{end}_token_id" for end in _ENDS]
    return [int(fields[name].contents()) for name in names if name in fields]


def _header(path: Path, architecture: str) -> dict[str, Any]:
    """What a file says of its model, by names without that of the architecture."""
    start = f"{architecture}."
    return {
        name.removeprefix(start): field.contents()
        for name, field in gguf.GGUFReader(path).fields.items()
        if name.startswith(start)
    }


def _complete(config: Any, path: Path, header: Mapping[str, Any]) -> None:
    """Give a config what transformers' reader leaves out, without a word.

    Raises:
        ModelError: the header has what is not supported.
    """
    for name, value in header.items():
        if name not in _READ and _NEUTRAL.get(name) != value:
            raise _unsupported(path, f"{name} = {value!r}")
    head_dim = header.get("attention.key_length", header.get("rope.dimension_count"))
    if head_dim is not None:
        config.head_dim = head_dim
        for name in ("attention.value_length", "rope.dimension_count"):
            if header.get(name, head_dim) != head_dim:
                raise _unsupported(path, f"{name} = {header[name]} and heads of {head_dim}")
    kind = header.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported(path, f"rope.scaling.type = {kind!r}")
    if kind == "none":
        return
    rope = {"rope_type": kind, "factor": header.get("rope.scaling.factor", 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = header.get(
            "rope.scaling.original_context_length", config.max_position_embeddings
        )
    config.rope_parameters = {**config.rope_parameters, **rope}


def _unsupported(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path.name} says {what}, which is not supported in a GGUF file; use the model's original "
        "Hugging Face folder with --quantize"
    )


def _save_tokenizer(tokenizer: Any, folder: Path, ends: Sequence[int] = ()) -> None:
    """Write it, and what ends a text: its own end of text, and `ends`."""
    tokenizer.save_pretrained(folder)
    own = tokenizer.eos_token_id
    all_ends = sorted({*ends, own} - {None})
    GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=all_ends if len(all_ends) > 1 else own,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)


def _save_model(model: Any, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`.

    transformers itself refuses to save a model that was read from a quantized file, although its
    weights are plain by now; so this says plainly what they are.
    """
    config = model.config
    # Readers that do not know rope_parameters, such as those of MLX, would take their own default.
    # A GGUF file that runs as it is has no other reader, and a new config would be a new target.
    config.rope_theta = config.rope_parameters["rope_theta"]
    _save_config(config, type(model).__name__, folder)
    state: dict[str, torch.Tensor] = model.state_dict()
    if config.tie_word_embeddings:  # the head is the embedding, stored once
        del state["lm_head.weight"]
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    replace_file(
        folder / "model.safetensors",
        lambda path: save_file(weights, path, metadata={"format": "pt"}),
    )


def _save_config(config: Any, architecture: str, folder: Path) -> None:
    for stale in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(stale, None)
    config.architectures = [architecture]
    config.save_pretrained(folder)


def _field(path: Path, name: str) -> Any:
    """What stands under a name in the file's header; None if nothing does."""
    field = gguf.GGUFReader(path).get_field(name)
    return None if field is None else field.contents()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the loader's progress bars and its remarks about quantized files off the terminal.

    Its bars have no switch of their own, so standard error itself is held back; an exception
    still says everything.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
