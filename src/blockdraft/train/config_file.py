"""A training run's settings from a TOML file and from the command line."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from blockdraft.core.errors import ConfigError
from blockdraft.train.config import TrainConfig

_PATHS = {"target", "out", "init_from", "feature_cache"}


def read_train_config(path: Path | None, overrides: Sequence[str]) -> TrainConfig:
    """The settings of `path`, with `key=value` overrides; values are written as in TOML.

    Text need not be quoted in an override. `target` may be a name; it is not resolved here.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a bad value.
    """
    settings = dict(_read_toml(path)) if path else {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"setting {override!r} has no value; write key=value")
        settings[key.strip()] = _value(text.strip())
    known = [field.name for field in fields(TrainConfig)]
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"setting {key!r} is unknown; {hint}")
    missing = [key for key in ("target", "data", "out") if key not in settings]
    if missing:
        raise ConfigError(f"settings lack {', '.join(missing)}; give each as key=value")
    return TrainConfig(**{key: _typed(key, value) for key, value in settings.items()})


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"settings {path}: {error}; give a TOML file") from error


def _value(text: str) -> Any:
    """A TOML value; what is none is text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _typed(key: str, value: Any) -> Any:
    """Text as a path where one is wanted; TrainConfig judges what is something else."""
    if key == "data":
        items = value if isinstance(value, list) else [value]
        return tuple(Path(item) if isinstance(item, str) else item for item in items)
    return Path(value) if key in _PATHS and isinstance(value, str) else value
