"""What a target is known by: the answers of one are not those of another."""

import hashlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase


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
