"""What all results have in common, as files: which kind they are, and where they come from.

A result says `result`, its kind, and `result_version`; then command, date, commit, versions and
machine; `config`, the options of the loaded pair; the options of the measurement; `definitions` of
its measures; `memory`. Loads no model library until a result is described.
"""

import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.core.words import counted

if TYPE_CHECKING:
    from blockdraft.measure.identity import LoadedTarget

VERSION = 1
"""Of the layout of results; another one is not read."""

KINDS = (
    "summary",
    "speed",
    "ways",
    "concurrency",
    "never-slower",
    "context",
    "traffic",
    "break-even",
    "pareto",
    "plan",
)
"""A summary is made by `tools/summarize_pair.py`, ways by `tools/experiments/compare_ways.py`; each
other kind has its command."""


MEASURED_ONE_BY_ONE = {
    "speed": "turns of prompts, over all runs,",
    "concurrency": "repeats of a point",
    "never-slower": "pairs",
    "context": "passages",
    "traffic": "repeats",
    "pareto": "repeats of a point",
}
"""What an interrupted run keeps, by the kind of its result."""


def describe_result(
    kind: str, llm: "LoadedTarget", definitions: Mapping[str, str], num_resumed: int = 0
) -> dict[str, Any]:
    """The head of a result, to be asked for when everything has been measured.

    num_resumed: of what the kind keeps, how much an earlier run measured; see `resumed`.
    """
    from blockdraft.measure.identity import describe_setting

    assert kind in KINDS
    keeps = kind in MEASURED_ONE_BY_ONE
    definitions = {**definitions, **(resumed(kind) if keeps else {})}
    return {
        "result": kind,
        "result_version": VERSION,
        **describe_setting(llm),
        "memory": describe_memory(),
        "definitions": definitions,
        **({"num_resumed": num_resumed} if keeps else {}),
    }


def resumed(kind: str) -> dict[str, str]:
    """The definition of `num_resumed` in a result."""
    return {
        "num_resumed": f"{MEASURED_ONE_BY_ONE[kind]} measured by an earlier, interrupted run of "
        "the same command; memory is that of the last run alone"
    }


def describe_memory() -> dict[str, int | None]:
    """The most bytes that this process ever held, and the most that torch took of its GPUs."""
    import torch

    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    on_gpu = None
    if torch.cuda.is_available():  # without a number, torch tells of the first card alone
        on_gpu = sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"most_process_bytes": most, "most_gpu_bytes": on_gpu}


@dataclass(frozen=True, slots=True)
class Result:
    """A result that was read."""

    path: Path
    kind: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its file, without the ending."""
        return self.path.stem

    @property
    def machine(self) -> str:
        """On what it was measured, in words."""
        machine = self.values.get("machine")
        if isinstance(machine, Mapping):
            with damage_refused(self):
                device = self.values.get("config", {}).get("device", "cpu")
                card = self.values.get("card", {}).get("gpu") or device
                where = "" if card == "cpu" else f", {card}"
                return f"{machine.get('cpu')}, {counted(machine.get('num_cpus', 0), 'core')}{where}"
        return str(machine or "an unknown machine")


@contextmanager
def damage_refused(result: Result) -> Iterator[None]:
    """Around what reads the values of a result, any of which may be missing or of another type.

    Raises:
        ConfigError: instead of what Python says of such a value.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"{result.path} is a {result.kind!r} result that was truncated or edited "
            f"({type(error).__name__}: {error}); measure again"
        ) from error


def read_result(path: Path) -> Result:
    """Read one file.

    Raises:
        ConfigError: it cannot be read, or is no result of a kind and version that is known.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        # An escape can say half of a character, which no page could be written with.
        json.dumps(values, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"cannot read {path}: {why_unread(error)}; give a JSON file that a bench command wrote"
        ) from error
    kind = values.get("result") if isinstance(values, dict) else None
    if kind not in KINDS:
        mistake = "does not say which result it is" if kind is None else f"is a {kind!r} result"
        raise ConfigError(
            f"{path} {mistake}; give files that --output of a bench command wrote: "
            f"{', '.join(KINDS)}"
        )
    version = values.get("result_version")
    if version != VERSION:
        raise ConfigError(
            f"{path} has result_version {version!r}, and this version of blockdraft reads "
            f"{VERSION}; measure again, or use the version that wrote it"
        )
    return Result(path, kind, values)


def read_results(place: Path) -> list[Result]:
    """The JSON files of a folder, by name, or one file.

    Raises:
        ConfigError: there is none, or one of them is no result.
    """
    if place.is_file():
        return [read_result(place)]
    if not place.is_dir():
        raise ConfigError(f"{place} does not exist; give a folder of results, or one of them")
    paths = sorted(place.glob("*.json"))
    if not paths:
        raise ConfigError(
            f"{place} holds no results; let bench commands write some there, with "
            f"--output {place / 'speed.json'}"
        )
    return [read_result(path) for path in paths]


def need(result: Result, *keys: str) -> Any:
    """A value that a result must have, by the keys that lead to it.

    Raises:
        ConfigError: it lacks it, such as a baseline that was not measured.
    """
    value: Any = result.values
    for depth, key in enumerate(keys, 1):
        if not isinstance(value, Mapping) or value.get(key) is None:
            where = ".".join(keys[:depth])
            raise ConfigError(
                f"{result.path} is a {result.kind!r} result without {where}; it was "
                "truncated or edited: measure again"
            )
        value = value[key]
    return value


def machines_of(results: Sequence[Result]) -> list[str]:
    """The machines of some results, each once."""
    return list(dict.fromkeys(result.machine for result in results))
