"""What a Hugging Face model folder must hold before anything is loaded from it."""

import re
from collections.abc import Iterable
from pathlib import Path

from blockdraft.core.files import read_json

GGUF_NAME = "model.gguf"
"""Weights that are read as they are."""
MASK_FILE = "mask_embedding.pt"
"""A vector that some drafters have beside their weights."""
INDEX_NAME = "model.safetensors.index.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SHARD = re.compile(r"(?P<start>.+)-\d+-of-(?P<total>\d{5})\.safetensors")
_LFS_MARK = b"version https://git-lfs"
"""With which the file begins that git leaves in place of a large one, where Git LFS is missing."""


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor of a checkpoint in several files.

    Raises:
        OSError: the index cannot be read.
        ValueError: it is damaged.
    """
    raw = read_json(path)
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("it names no file for each tensor")
    # What lies elsewhere would be in no hash of the model.
    if outside := [name for name in names.values() if Path(name).name != name]:
        raise ValueError(f"it names {outside[0]!r:.80}, which is not a file beside it")
    return names


def gguf_file(folder: Path) -> Path | None:
    """Where the weights of a folder lie, if they are in a GGUF file and nowhere else."""
    path = folder / GGUF_NAME
    return path if path.is_file() and not any(folder.glob("*.safetensors")) else None


def missing_parts(folder: Path) -> list[str]:
    """Return the names of the parts that a model folder lacks; empty for a whole one.

    It needs `config.json` and safetensors weights: all shards that its index names, if it has one,
    or that the names of those that are there tell of. Or it stands for a GGUF file, see `prepare`.
    """
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    # Large too, and so left out by git where Git LFS is missing.
    missing += _pointers(folder, [name for name in _TOKENIZERS if (folder / name).is_file()])
    if gguf_file(folder) is not None:
        return missing
    index = folder / INDEX_NAME
    if not index.is_file():
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        if not found:
            return [*missing, "*.safetensors"]
        return missing + _other_shards(found) + _pointers(folder, found)
    try:
        shards = set(read_index(index).values())
    except (OSError, ValueError) as error:
        return [*missing, f"a readable {INDEX_NAME} ({error})"]
    missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    return missing + _pointers(folder, sorted(shards.difference(missing)))


def _other_shards(found: Iterable[str]) -> list[str]:
    """Those that belong to shards that are there, and are not: the second of two, for instance."""
    names: set[str] = set()
    for shard in filter(None, map(_SHARD.fullmatch, found)):
        start, width, total = shard["start"], len(shard["total"]), int(shard["total"])
        names.update(
            f"{start}-{number:0{width}}-of-{shard['total']}.safetensors"
            for number in range(1, total + 1)
        )
    return sorted(names.difference(found))


def _pointers(folder: Path, names: Iterable[str]) -> list[str]:
    """Those of the files that git has not fetched, in the words of `missing_parts`."""
    found = []
    for name in names:
        with (folder / name).open("rb") as file:
            if file.read(len(_LFS_MARK)) == _LFS_MARK:
                found.append(f"{name} (a pointer of Git LFS is in its place)")
    return found
