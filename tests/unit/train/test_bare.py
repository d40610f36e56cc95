"""Training on a machine that has torch and transformers, and little else."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import blockdraft
from blockdraft.models.draft.dflash import DraftModel
from tests.train_runs import settings_of, small_config

ABSENT = (
    *("accelerate", "datasets", "fastapi", "gguf", "llguidance", "prometheus_client", "pydantic"),
    *("rich", "tensorboard", "typer", "uvicorn"),
)
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # importing one of them fails
runpy.run_module("blockdraft.train", run_name="__main__")
"""


def bare(*settings: str) -> subprocess.CompletedProcess[str]:
    source = str(Path(blockdraft.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", BARE, *settings],
        env=os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_training_needs_no_package_of_the_command_line(tmp_path):
    config = small_config(tmp_path, max_steps=2, tau_limit=1, tau_max_tokens=4)
    result = bare(*settings_of(config))
    assert result.returncode == 0, result.stderr
    assert "held out: tau" in result.stderr
    assert DraftModel.from_pretrained(result.stdout.strip()).config.block_size == 4


def test_mistakes_are_said_in_one_line(tmp_path):
    result = bare("blocksize=3", "target=a", "out=b", "data=c")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "did you mean block_size?" in result.stderr
    config = small_config(tmp_path)
    result = bare(f"target={config.target}", f"out={config.out}", "answers.num_self_written=2")
    assert result.returncode == 2
    assert "holds no finished answers; write them" in result.stderr
