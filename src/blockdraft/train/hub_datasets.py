"""Rows of a data set of the Hugging Face hub. Needs the package datasets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from blockdraft.core.errors import ConfigError


def read_dataset(name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of "name" or "name:split", "train" unless given.

    A folder is read where it lies: one that `save_to_disk` wrote, or one of data files.

    Raises:
        ConfigError: it cannot be loaded, or has no such split.
    """
    path, _, split = name.partition(":")
    try:
        if (Path(path) / "state.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            if isinstance(loaded, datasets.DatasetDict):
                loaded = loaded[split or "train"]
        else:
            loaded = datasets.load_dataset(path, split=split or "train")
    # The library raises any type, from its own to those of its HTTP library.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"cannot load the data set {name!r}: {reason}; check name and network, or give a folder"
        ) from error
    for row in loaded:
        yield dict(row)
