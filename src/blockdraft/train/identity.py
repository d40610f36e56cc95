"""What a target and texts are known by: the answers of one target are not those of another."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from blockdraft.train.dataset import Example


def target_sha256(folder: Path) -> str:
    """Hash of a model folder's config and weights, whatever the folder is called."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the chat template."""
    return hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()


def texts_sha256(examples: Iterable[Example]) -> str:
    """Hash of the tokens of examples, in their order."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(repr((example.prompt_ids, example.response_ids)).encode())
    return digest.hexdigest()
