"""The tokenizer that lies in a GGUF file.

transformers has a reader of its own, which gave the default target another end of text in 5.17 than
since 5.18, and takes no notice of the pre-tokenizer.
"""

from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from blockdraft.core.errors import ModelError

_CONTROL, _USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Special tokens in the words of GGUF and of transformers."""


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file: byte-level BPE, with the chat template if there is one.

    Raises:
        ModelError: a part is missing, or the pre-tokenizer or another setting is not known here.
    """
    fields = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in gguf.GGUFReader(path).fields.items()
        if name.startswith("tokenizer.")
    }
    pre_tokenizer = _pre_tokenizer(path, fields)
    tokens: list[str] = fields["ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["ggml.merges"]]
    tokenizer: Any = Tokenizer(
        BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    for token, kind in zip(tokens, fields["ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            is_special = kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, special=is_special, normalized=False)])
    roles = {
        f"{name}_token": tokens[fields[f"ggml.{role}_token_id"]]
        for role, name in _ROLES.items()
        if f"ggml.{role}_token_id" in fields
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=fields.get("chat_template"), **roles
    )


def _pre_tokenizer(path: Path, fields: dict[str, Any]) -> PreTokenizer:
    """The splitter that the file names; plain byte level would join digits.

    "2024" would become tokens never seen in training.
    """
    name = fields.get("ggml.pre")
    if name != "smollm":
        raise _unknown(path, f"asks for the pre-tokenizer {name!r}, and only 'smollm' is known")
    for needed in ("tokens", "merges", "token_type"):
        if f"ggml.{needed}" not in fields:
            raise _unknown(path, f"lacks the {needed} of its tokenizer")
    for setting in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        if fields.get(f"ggml.{setting}"):
            raise _unknown(path, f"says {setting} for its tokenizer, which is not supported")
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    return Sequence([Digits(individual_digits=True), byte_level])


def _unknown(path: Path, what: str) -> ModelError:
    return ModelError(
        f"{path.name} {what}; use the model's original Hugging Face folder, or put its "
        "tokenizer.json and tokenizer_config.json beside the file"
    )
