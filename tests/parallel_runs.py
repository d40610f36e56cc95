"""What the tests of runs with several processes share: the launcher, and when two runs are one."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train.config import TrainConfig
from tests.train_runs import logged, settings_of

WAYS: dict[str, dict[str, Any]] = {
    "rows": {},
    "packed rows, two batches a step": {"accumulate": 2, "pack_len": 1024},
    "a last batch of one row": {"batch_sequences": 3},
}

MUON_NOISE = 2e-4
"""Muon multiplies in bfloat16: what another order of sums does to weights in eight steps, twice."""
PATIENCE = 900.0
"""Seconds until processes that wait for each other are given up."""


def free_port() -> str:
    """A port on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def launch(config: TrainConfig, count: int, before: str = "") -> list[subprocess.Popen[str]]:
    """What `torchrun --nproc-per-node` does: one command, and the process's number outside it.

    before: Python that each process runs first.
    """
    program = f"{before}\nfrom blockdraft.cli.main import main\nmain()"
    command = [sys.executable, "-c", program, "train", "--json", *settings_of(config)]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def outputs_of(processes: list[subprocess.Popen[str]]) -> list[tuple[str, str]]:
    """(stdout, stderr) of each process, which must end well."""
    try:
        # All at once: a full pipe of one would stop all.
        with ThreadPoolExecutor() as pool:
            outputs = list(
                pool.map(lambda process: process.communicate(timeout=PATIENCE), processes)
            )
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return outputs


def assert_same_run(found: Path, expected: Path, atol: float = MUON_NOISE) -> None:
    """Two runs' folders hold the same losses, gradient norms, and last weights.

    atol: of a tensor's weights in the mean (root mean square), for sums in another order; a single
    weight whose gradient is all but 0 may differ by more under AdamW.
    """
    one, two = logged(expected), logged(found)
    assert [row["step"] for row in two] == list(range(1, len(one) + 1))
    for a, b in zip(one, two, strict=True):
        assert b["nll"] == pytest.approx(a["nll"], abs=2e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)
    # The best drafter of so short a run may be that of its beginning.
    weights, others = (
        DraftModel.from_pretrained(folder / "last").state_dict() for folder in (expected, found)
    )
    assert weights.keys() == others.keys()
    for key, value in weights.items():
        assert float((others[key] - value).square().mean().sqrt()) <= atol, key
