"""Two processes train as one does."""

import dataclasses
import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from blockdraft.models.draft import DraftModel
from blockdraft.train.trainer import train
from tests.train_runs import logged, small_config


def launch(config, count):
    """What `torchrun --nproc-per-node` does: one command, and the process's number outside it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = config.to_dict().items()
    settings = [f"{name}={'none' if v is None else json.dumps(v)}" for name, v in values]
    command = [sys.executable, "-m", "blockdraft.cli.main", "train", "--json", *settings]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"accumulate": 2, "pack_len": 1024}], ids=str)
def test_two_processes_give_the_losses_of_one(tmp_path, changes):
    config = small_config(tmp_path, max_steps=8, save_steps=4, **changes)
    alone = train(config)
    parted = dataclasses.replace(config, out=tmp_path / "parted")
    processes = launch(parted, 2)
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert json.loads(outputs[0])["steps"] == 8
    assert outputs[1] == ""
    one, two = logged(config.out), logged(parted.out)
    assert [row["step"] for row in two] == list(range(1, 9))
    for a, b in zip(one, two, strict=True):
        assert b["nll"] == pytest.approx(a["nll"], abs=2e-3)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-2)
    weights, others = (
        DraftModel.from_pretrained(folder).state_dict()
        for folder in (alone.drafter, parted.out / "drafter")
    )
    for name, value in weights.items():
        torch.testing.assert_close(others[name], value, atol=1e-3, rtol=1e-2)
