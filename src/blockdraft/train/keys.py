"""All keys of a run file with their defaults, and what those mean that need a word."""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import get_type_hints

from blockdraft.core.settings import described, plain
from blockdraft.data.config import DataConfig
from blockdraft.train.config import TrainConfig
from blockdraft.train.config_file import ANSWERS, GIVEN_BY_THE_RUN

Kind = type[TrainConfig] | type[DataConfig]

_ENTRY = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")


def describe_keys() -> str:
    """A TOML file of the defaults; keys without one, and those of answers, stand behind a "#"."""
    lines = [
        "# All settings of a training run, with their defaults, as a file RUN.toml to start from.",
        '# On a command line write key=value. "none" leaves a setting unset. The first three',
        "# have no default; `data` may be left out with the table [answers] at the end.",
        *_lines(TrainConfig),
        "",
        "# With this table the run first lets the target write answers, and trains on them and on",
        "# `data`. To use it, remove the # before the table and its keys; on a command line write",
        "# answers.key=value.",
        f"#[{ANSWERS}]",
        *(line if line.startswith("#") else f"#{line}" for line in _lines(DataConfig)),
    ]
    return "\n".join(lines) + "\n"


def _lines(kind: Kind) -> Iterator[str]:
    meanings, kinds = _meanings(kind), get_type_hints(kind)
    for field in fields(kind):
        if kind is DataConfig and field.name in GIVEN_BY_THE_RUN:
            continue
        for line in meanings.get(field.name, ()):
            yield f"# {line}".replace("None", '"none"')
        if field.default is MISSING:
            yield f"#{field.name} ="
        else:
            value = "none" if field.default is None else plain(field.default)
            choice = described(kinds[field.name])
            hint = f"  # {choice}" if choice.startswith("one of") else ""
            yield f"{field.name} = {json.dumps(value)}{hint}"


def _meanings(kind: Kind) -> Mapping[str, list[str]]:
    """What the docstring says, under the first of the names that it says it of."""
    meanings: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").splitlines():
        if entry := _ENTRY.fullmatch(line):
            names, text = entry.groups()
            lines = meanings[names.split(", ")[0]] = [f"{names}: {text}" if "," in names else text]
        elif line.startswith(" " * 8):
            lines.append(line.strip())
    return meanings
