"""Programs of others that ask the server. Nothing here installs them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FOLDERS_VARIABLE = "BLOCKDRAFT_CLIENTS"
PATIENCE = 1200


def find_client(name: str) -> Path:
    """The program of this name on the path or in the folders that $BLOCKDRAFT_CLIENTS lists.

    Skips the test that asks where it is not installed.
    """
    folders = [os.environ.get(FOLDERS_VARIABLE, ""), os.environ.get("PATH", os.defpath)]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        pytest.skip(f"{name} is not installed, nor in a folder of ${FOLDERS_VARIABLE}")
    return Path(found)


def interpreter_of(name: str) -> Path:
    """The Python whose environment holds the program of this name; skips without it."""
    return find_client(name).with_name("python")


def run_client(*command: object, cwd: Path = FOLDER, **variables: str) -> str:
    """What the program prints; it must succeed. No hub of models is asked."""
    # One thread: the server computes beside it.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **offline, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout
