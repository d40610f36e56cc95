"""Turn a GGUF file into a Hugging Face folder: config, bfloat16 safetensors, tokenizer."""

import contextlib
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from blockdraft.core.errors import ModelError


def convert_gguf(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file into `folder`, which is made here.

    Weights are dequantized to float32 and rounded to bfloat16. Killed halfway, this leaves a part
    of a folder: give it a temporary one and rename that.

    Raises:
        ModelError: the file's pre-tokenizer is not known here.
    """
    pre_tokenizer = _pre_tokenizer(path)
    folder.mkdir()
    with _silence():
        tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.bfloat16
        )
        GenerationConfig(
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(folder)
        _save_model(model, folder)


def _save_model(model: Any, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`.

    transformers itself refuses to save a model that was read from a quantized file, although its
    weights are plain by now; so this says plainly what they are.
    """
    config = model.config
    for stale in ("quantization_config", "_model_name_or_path"):
        config.__dict__.pop(stale, None)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    state: dict[str, torch.Tensor] = model.state_dict()
    if config.tie_word_embeddings:  # the head is the embedding, stored once
        del state["lm_head.weight"]
    weights = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _pre_tokenizer(path: Path) -> PreTokenizer:
    """Return the splitter that the file names.

    transformers reads the vocabulary and the merges of a GGUF file but not this name, and falls
    back to plain byte level, which joins digits: "2024" would become tokens never seen in training.
    """
    field = gguf.GGUFReader(path).get_field("tokenizer.ggml.pre")
    name = None if field is None else field.contents()
    if name != "smollm":
        raise ModelError(
            f"{path.name} asks for the pre-tokenizer {name!r}, and only 'smollm' is known; "
            "use the model's original Hugging Face folder"
        )
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    return Sequence([Digits(individual_digits=True), byte_level])


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
