"""A run's settings from a TOML file and from the command line."""

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.core.settings import from_toml
from blockdraft.data.config import DataConfig
from blockdraft.hub.resolve import resolve_model
from blockdraft.train.config import TrainConfig
from blockdraft.train.parallel import resolve_own_device

ANSWERS = "answers"
"""The table of a run file whose keys are those of DataConfig, and the folder below `out`."""
GIVEN_BY_THE_RUN = ("output", "target", "dtype", "device")

_DEFAULT = object()
"""The value of a setting that is taken back."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run: its training, and the answers that are to be written before it, if any."""

    train: TrainConfig
    answers: DataConfig | None


def read_run(path: Path | None, overrides: Sequence[str]) -> RunFile:
    """The settings of `path`, with `key=value` overrides; values are written as in TOML.

    Text need not be quoted in an override, and `key=` takes back what the file says, so that the
    default holds. `answers.key=value` is a key of the table [answers], whose answers join those of
    `data`. `target` may be a name; it is not resolved here.

    Raises:
        ConfigError: an unreadable file, an unknown key, or a bad value.
    """
    settings = dict(_read_toml(path)) if path else {}
    answers = settings.pop(ANSWERS, {})
    if not isinstance(answers, dict):
        raise ConfigError(f"answers is {answers!r}; make it a table, [answers]")
    answers = dict(answers)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"setting {override!r} has no value; write key=value")
        table, dot, inner = key.strip().rpartition(".")
        if dot and table != ANSWERS:
            raise ConfigError(f"setting {key!r} is unknown; the only table is {ANSWERS}")
        (answers if dot else settings)[inner] = _value(text.strip())
    _check_names(settings, _known(TrainConfig), "")
    _check_names(answers, [k for k in _known(DataConfig) if k not in GIVEN_BY_THE_RUN], "answers.")
    settings, answers = (
        {key: value for key, value in table.items() if value is not _DEFAULT}
        for table in (settings, answers)
    )
    missing = [key for key in ("target", "out") if key not in settings]
    if not answers and "data" not in settings:
        missing.append("data (or answers.prompts, or answers.num_self_written)")
    if missing:
        raise ConfigError(f"settings lack {', '.join(missing)}; give each as key=value")
    return _assemble(settings, answers)


def resolve_run(arguments: Sequence[str]) -> RunFile:
    """The run of a command line, [RUN.toml] [KEY=VALUE].., with models by their folders.

    Raises:
        ConfigError: see `read_run`; or two files, an unknown model or device.
    """
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"{files[1]!r} is a second file; give one, and settings as key=value")
    settings = [text for text in arguments if "=" in text]
    run = read_run(Path(files[0]) if files else None, settings)
    config = replace(run.train, device=resolve_own_device(run.train.device))
    config = replace(config, target=resolve_model(str(config.target)))
    # A folder stays as it was written: a run goes on only with the settings that it began with.
    if config.init_from is not None and not config.init_from.is_dir():
        config = replace(config, init_from=resolve_model(str(config.init_from)))
    return replace(run, train=config)


def _assemble(settings: dict[str, Any], answers: dict[str, Any]) -> RunFile:
    typed = _typed(settings, TrainConfig)
    if not answers:
        return RunFile(train=TrainConfig(**typed), answers=None)
    out = typed["out"]
    folder = out / ANSWERS if isinstance(out, Path) else Path(ANSWERS)
    typed["data"] = (*typed.get("data", ()), folder)
    train = TrainConfig(**typed)
    data = DataConfig(
        **_typed(answers, DataConfig),
        output=folder,
        target=str(train.target),
        dtype=train.dtype,
        device=train.device,
    )
    return RunFile(train=train, answers=data)


def _known(kind: type[TrainConfig] | type[DataConfig]) -> list[str]:
    return [field.name for field in fields(kind)]


def _check_names(settings: Mapping[str, Any], known: Sequence[str], prefix: str) -> None:
    for key in settings:
        if key not in known:
            near = " or ".join(prefix + name for name in difflib.get_close_matches(key, known))
            hint = f"did you mean {near}? " if near else ""
            raise ConfigError(
                f"setting {prefix + key!r} is unknown; {hint}`blockdraft train --keys` lists all"
            )


def _read_toml(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = why_unread(error)
        raise ConfigError(f"cannot read settings {path}: {reason}; give a TOML file") from error


def _value(text: str) -> Any:
    """A TOML value; what is none is text, and no text is the default."""
    if not text:
        return _DEFAULT
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # of TOML, of too many digits, or of lists in lists
        return text


def _typed(settings: Mapping[str, Any], kind: type[TrainConfig] | type[DataConfig]) -> Any:
    """Values as the fields' kinds; the dataclass judges what is something else.

    Raises:
        ConfigError: what may be unset is given another word for it, which would be a path or text.
    """
    kinds = get_type_hints(kind)
    for key, value in settings.items():
        may_be_unset = type(None) in get_args(kinds[key])
        if may_be_unset and value != "none" and str(value).lower() in ("none", "null"):
            name = key if kind is TrainConfig else f"{ANSWERS}.{key}"
            raise ConfigError(
                f'{name} is {value!r}; give "none" to leave it unset, or nothing ({name}=) '
                "for its default"
            )
    return {key: from_toml(kinds[key], value) for key, value in settings.items()}
