"""What a target and texts are known by: the answers of one target are not those of another."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from blockdraft.core.fingerprint import hash_file
from blockdraft.data.store import Example, TextStore
from blockdraft.measure.identity import hash_text


def target_sha256(folder: Path) -> str:
    """Hash of a model folder's config and weights, whatever the folder is called.

    Answers, states and caches that go on are held against it: a changed config, such as another
    scaling of the rotation, makes another target of the same weights. `core.fingerprint` lists the
    other hashes of models.
    """
    digest = hashlib.sha256()
    for path in sorted(
        [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.gguf")]
    ):
        digest.update(path.name.encode())
        digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hash of a file, read once a process unless it changes."""
    status = path.stat()
    return _file_sha256(path.resolve(), status.st_size, status.st_mtime_ns)


@lru_cache
def _file_sha256(path: Path, size: int, changed_at: int) -> str:
    return hash_file(path)


def template_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the chat template."""
    return hash_text(str(tokenizer.chat_template))


def texts_sha256(examples: Sequence[Example]) -> str:
    """Hash of the tokens of examples, in their order."""
    return TextStore.of(examples).sha256()
