"""Hashes of all that an output depends on. Loads no model library."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockdraft.core.fingerprint import hash_files
from blockdraft.proof.corpus import ProofPrompt

PACKAGE = Path(__file__).parents[1]
KERNELS = PACKAGE / "kernels"
_WEIGHTS = ("*.safetensors", "*.gguf", "config.json", "generation_config.json")
_NATIVE = ("**/*.cpp", "**/*.h")
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt")


def hash_model(folder: Path) -> str:
    """SHA-256 over the weights and configs of a model folder."""
    return hash_files(folder, _WEIGHTS)


def hash_tokenizer(folder: Path) -> str:
    """SHA-256 over the files of a tokenizer."""
    return hash_files(folder, _TOKENIZER)


def hash_code() -> str:
    """SHA-256 over the Python files of this package, as they are installed."""
    return hash_files(PACKAGE, ("**/*.py",))


def hash_kernels() -> str:
    """SHA-256 over the sources of the native kernels, as they are installed."""
    return hash_files(KERNELS, _NATIVE)


def hash_prompts(prompts: Sequence[ProofPrompt]) -> str:
    """SHA-256 over what is asked."""
    return hash_value([asdict(prompt) for prompt in prompts])


def hash_text(text: str) -> str:
    """SHA-256 of a text, whatever characters it holds."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def hash_value(value: Any) -> str:
    """SHA-256 of plain values. Floats count to the last bit: JSON writes them to be read back."""
    return hash_text(json.dumps(value, sort_keys=True))
