"""Where prompts come from: files and data sets, without repeats and overlaps."""

import random
from collections.abc import Sequence
from pathlib import Path

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.overlap import without_overlap
from blockdraft.data.prompts import (
    Prompt,
    distinct,
    prompt_of_row,
    read_prompts,
    with_own_ids,
)


def gather_prompts(config: DataConfig) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of files and data sets without repeats and overlaps, and how many there were.

    Raises:
        ConfigError: one is missing, broken or empty.
    """
    rows = [prompt for path in config.prompts for prompt in read_prompts(path)]
    num_without = 0
    for name in config.datasets:
        of_dataset, num_skipped = _read_dataset(name)
        rows += of_dataset
        num_without += num_skipped
    if not rows and not config.num_self_written:
        names = ", ".join([*map(str, config.prompts), *config.datasets])
        raise ConfigError(f"{names} holds no prompts; give rows with messages, turns or prompt")
    found = with_own_ids(rows)
    prompts = distinct(found)
    clean = without_overlap(prompts, config.exclude)
    return clean, {
        "prompts": len(found),
        "rows_without_prompt": num_without,
        "repeated_prompts": len(found) - len(prompts),
        "overlapping_prompts": len(prompts) - len(clean),
    }


def _read_dataset(name: str) -> tuple[list[Prompt], int]:
    """(the prompts of a data set, how many rows hold none): nobody can mend its rows."""
    try:
        from blockdraft.data.hub_datasets import read_dataset
    except ImportError as error:
        raise ConfigError(
            f"the data set {name!r} needs the package datasets; pip install datasets"
        ) from error
    path = name.partition(":")[0]
    short = Path(path if Path(path).is_dir() else path.partition("@")[0]).name
    prompts, num_without, reason = [], 0, ""
    for place, row in enumerate(read_dataset(name)):
        try:
            prompts.append(prompt_of_row(row, short, place, Path(name), place + 1))
        except ConfigError as error:
            num_without += 1
            reason = f"{error} (its columns are {', '.join(row)})"
    if num_without and not prompts:
        raise ConfigError(f"data set {name!r} holds no prompts: {reason}")
    return prompts, num_without


def chosen(config: DataConfig, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Those that are to be answered, in random order."""
    shuffled = list(prompts)
    random.Random(config.seed).shuffle(shuffled)
    return shuffled[: config.limit]
