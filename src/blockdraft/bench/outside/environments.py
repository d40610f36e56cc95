"""Environments of other engines, made by pip below the cache."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from blockdraft.bench.outside.engines import OutsideEngine
from blockdraft.bench.outside.interface import EngineFailed
from blockdraft.core.errors import BlockdraftError
from blockdraft.core.files import folder_lock
from blockdraft.hub.cache_dir import cache_dir

logger = logging.getLogger(__name__)

INSTALL_SECONDS = 3600.0
_INSTALLED = "blockdraft.json"
"""Written into an environment when all is installed: the packages that were asked for."""


def python_of(engine: OutsideEngine) -> Path:
    """The interpreter that runs an engine; its packages are installed if need be.

    Raises:
        EngineFailed: they cannot be; says what pip says.
    """
    if not engine.packages:
        return Path(sys.executable)
    folder = cache_dir() / "engines" / engine.environment
    inside = folder / "env"
    python = inside / "bin" / "python"
    wanted = list(engine.packages)
    try:
        with folder_lock(folder):
            marker = inside / _INSTALLED
            if marker.exists() and json.loads(marker.read_text(encoding="utf-8")) == wanted:
                return python
            logger.info("installing %s for --against %s", " ".join(wanted), engine.name)
            try:
                _install(inside, python, engine)
            except EngineFailed:
                shutil.rmtree(inside, ignore_errors=True)
                raise
            marker.write_text(json.dumps(wanted), encoding="utf-8")
    except EngineFailed:
        raise
    except (BlockdraftError, OSError, ValueError) as error:
        raise EngineFailed(f"cannot be set up in {folder}: {error}") from error
    return python


def _install(folder: Path, python: Path, engine: OutsideEngine) -> None:
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run([*pip, "install", "--progress-bar", "off", *engine.packages])
    if engine.removed:
        _run([*pip, "uninstall", "--yes", *engine.removed])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(
            f"cannot be installed: {_short(command)} took more than {INSTALL_SECONDS:g} s"
        ) from error
    except OSError as error:
        raise EngineFailed(f"cannot be installed: {error}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")]
        message = " ".join((errors or lines)[-1:])[:500]
        raise EngineFailed(
            f"cannot be installed: {_short(command)} says: {message}; pip's own settings, such as "
            "PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS, are honored"
        )


def _short(command: list[str]) -> str:
    return " ".join(part for part in command[1:] if not part.startswith("--"))
