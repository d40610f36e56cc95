"""Rows of a data set of the Hugging Face hub. Needs the package datasets."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from blockdraft.core.errors import ConfigError, NetworkError, reason_of

_COLON = re.compile(r":(?![^\[]*\])")
"""But for those of a slice, "train[:1000]"."""


def read_dataset(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of "name", "name:split" or "name:config:split".

    "name@revision" is a branch, tag or commit of a data set. The split is "train" unless given, and
    may be a slice of one. A folder is read where it lies: one that `save_to_disk` wrote, or one of
    data files.

    Raises:
        ConfigError: it cannot be loaded, or has no such split.
        NetworkError: the hub cannot be reached.
    """
    path, *rest = _COLON.split(name)
    if len(rest) > 2:
        raise ConfigError(f"data set {name!r} has too many parts; give NAME:CONFIG:SPLIT")
    path, _, revision = (path, "", "") if Path(path).is_dir() else path.partition("@")
    split, config = (rest[-1] if rest else "") or "train", rest[0] if len(rest) == 2 else None
    try:
        if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split]
        else:
            loaded = datasets.load_dataset(path, config, split=split, revision=revision or None)
    # The library raises any type, from its own to those of its HTTP library.
    except Exception as error:
        reason = reason_of(error)
        kind = NetworkError if isinstance(error, ConnectionError | TimeoutError) else ConfigError
        raise kind(
            f"cannot load the data set {name!r}: {reason}; check NAME:CONFIG:SPLIT "
            "and network, or give a folder"
        ) from error
    yield from loaded
