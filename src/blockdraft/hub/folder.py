"""What a Hugging Face model folder must hold before anything is loaded from it."""

import json
from pathlib import Path

GGUF_NAME = "model.gguf"
"""Weights that are read as they are."""
_INDEX = "model.safetensors.index.json"


def gguf_file(folder: Path) -> Path | None:
    """Where the weights of a folder lie, if they are in a GGUF file and nowhere else."""
    path = folder / GGUF_NAME
    return path if path.is_file() and not any(folder.glob("*.safetensors")) else None


def missing_parts(folder: Path) -> list[str]:
    """Return the names of the parts that a model folder lacks; empty for a whole one.

    It needs `config.json` and safetensors weights: all shards that its index names, if it has one.
    Or it stands for a GGUF file, see `prepare`.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if gguf_file(folder) is not None:
        return missing
    index = folder / _INDEX
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            missing.append("*.safetensors")
        return missing
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return [*missing, f"a readable {_INDEX}"]
    return missing + sorted(shard for shard in shards if not (folder / shard).is_file())
