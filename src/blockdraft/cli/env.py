"""`blockdraft env`: what a bug report needs to know."""

from collections.abc import Iterator, Mapping
from typing import Any

from blockdraft.cli import options
from blockdraft.cli.output import print_json


def env(as_json: options.Json = False) -> None:
    """Print versions, machine and settings for a bug report, without secrets."""
    from blockdraft.measure.environment import describe_installation

    found = describe_installation()
    if as_json:
        print_json(found)
        return
    for name, value in _lines(found):
        print(f"{name + ':':<32} {value}")


def _lines(found: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """A line for each value; those of an inner object are named after it."""
    for key, value in found.items():
        name = f"{before}{key.replace('_', ' ')}" if not key.isupper() else f"{before}{key}"
        if isinstance(value, Mapping):
            yield from _lines(value, f"{name} ")
        elif key.endswith("_bytes") and value is not None:
            yield name.removesuffix(" bytes"), f"{value / 2**30:.1f} GiB"
        else:
            yield name, _shown(value)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
