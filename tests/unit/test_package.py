"""What is installed is all that stands in the sources."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_package(tmp_path):
    """Built without a network, by the build backend that is installed."""
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=NOT_SOURCE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", tmp_path, tree]
    before = {path.relative_to(tree / "src").as_posix()
              for path in (tree / "src").rglob("*") if path.is_file()}  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = tmp_path.glob("blockdraft-*-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == before
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {"blockdraft/py.typed", "blockdraft/kernels/cpu/source/products.h"} <= set(names)
