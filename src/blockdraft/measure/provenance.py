"""Where a result comes from: command, code, versions, machine. Loads no model library."""

import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from blockdraft.core.machine import cpu_name, num_cpus

_PACKAGES = ("blockdraft", "torch", "transformers", "tokenizers", "numpy")


def describe_environment() -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "command": sys.argv,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "versions": {"python": platform.python_version()} | versions(_PACKAGES),
        "machine": {
            "cpu": cpu_name(),
            "num_cpus": num_cpus(),
            "platform": platform.platform(),
        },
    }


def command_line(command: Sequence[object]) -> str:
    """The command of a result, as its reader can give it again: quoted, without our own folder."""
    program, *arguments = map(str, command)
    path = Path(program)
    if path.name == "blockdraft" or path.parts[-2:] == ("blockdraft", "__main__.py"):
        return shlex.join(["blockdraft", *arguments])
    python = ["python"] if path.suffix == ".py" else []
    return shlex.join([*python, program, *arguments])


def git_commit() -> str | None:
    """Commit of the checkout that this code runs from, "+" if files differ; None without one."""
    try:
        # Installed below another project's checkout, this file is none of that project's.
        _git("ls-files", "--error-unmatch", Path(__file__).name)
        described = _git("describe", "--always", "--abbrev=12", "--exclude=*")
        return described + ("+" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    # Only the checkout of this file counts, not whatever folder the user works in.
    folder = Path(__file__).parent
    run = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    )
    return run.stdout.strip()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of packages, without importing them; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    if found.get("torch") is not None:
        found["torch"] = _torch_build() or found["torch"]
    return found


def _torch_build() -> str | None:
    """Torch's version with its build, such as +cu130, which the name of a package may leave out."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"](.+)['\"]$", text, re.MULTILINE)
    return found[1] if found else None
