"""Whether two models read and write the same tokens."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def tokenizer_difference(target: Path, other: Path, *, trusts: bool = False) -> str | None:
    """The first token id that stands for two different tokens; None if there is none.

    Ids that only one of them has do not count: vocabularies are padded, and get tokens of their
    own at the end. None also if one of the folders has no tokenizer to compare. `trusts`: code of
    the folders may be run.
    """
    if not (has_tokenizer(target) and has_tokenizer(other)):
        return None
    theirs, own = _tokens(target, trusts), _tokens(other, trusts)
    for token_id in sorted(theirs.keys() & own.keys()):
        if theirs[token_id] != own[token_id]:
            return (
                f"token {token_id} is {own[token_id]!r} in its tokenizer and {theirs[token_id]!r} "
                "in the target's"
            )
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder holds files of a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


def _tokens(folder: Path, trusts: bool) -> dict[int, str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=trusts
    )
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}
