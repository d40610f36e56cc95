"""Two processes train as one does."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from blockdraft.core.errors import ConfigError
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import target_without_weights
from blockdraft.train import parallel
from blockdraft.train.config_file import resolve_run
from blockdraft.train.prepare import read_data
from blockdraft.train.trainer import train
from tests.parallel_runs import (
    PATIENCE,
    WAYS,
    assert_same_run,
    free_port,
    launch,
    outputs_of,
)
from tests.tiny import tiny_target_folder
from tests.train_runs import logged, settings_of, small_config


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["whole target", "shared target"])
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_give_the_losses_of_one(tmp_path, way, shared):
    config = small_config(tmp_path, max_steps=8, save_steps=4, **WAYS[way])
    if way == "a last batch of one row":
        assert len(read_data(config)[0]) % 3 == 1  # so that a process has none
    alone = train(config)
    parted = dataclasses.replace(config, out=tmp_path / "parted", shard_target=shared)
    if shared and way != "rows":
        parted = dataclasses.replace(parted, feature_cache=tmp_path / "cache")
    outputs = outputs_of(launch(parted, 2))
    assert json.loads(outputs[0][0])["steps"] == 8
    assert outputs[1][0] == ""
    assert_same_run(parted.out, alone.drafter.parent)
    if shared:
        model = target_without_weights(config.target)
        layers = sum(p.numel() for p in decoder_layers(model).parameters())
        rest = sum(p.numel() for p in model.parameters()) - layers
        assert f"this process holds {layers // 2 + rest}" in outputs[0][1]


@pytest.mark.parametrize(
    ("rank", "count", "reason"),
    [
        ("0", "8", "WORLD_SIZE is 8 in the environment, but no launcher .* for --plan only"),
        (
            "0",
            "x",
            "RANK is '0' and WORLD_SIZE 'x' in the environment; start the run with torchrun",
        ),
        ("2", "2", "RANK is '2' and WORLD_SIZE '2'"),
        ("0", "0", "WORLD_SIZE '0'"),
    ],
)
def test_an_environment_of_no_launcher_is_refused(tmp_path, monkeypatch, rank, count, reason):
    """Somebody may have set it for a plan, as the guide says, and starts the run then."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", count)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    config = small_config(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        train(config)
    assert not config.out.exists()


@pytest.fixture
def folder(tmp_path):
    return tiny_target_folder(tmp_path)


@pytest.fixture
def cards(folder, monkeypatch) -> list[object]:
    """Two of them; what was asked of which card, in order."""
    asked: list[object] = []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(parallel, "resolve_device", lambda name: asked.append(name) or "cuda")
    return asked


def test_a_process_touches_no_card_before_its_own(tmp_path, folder, cards, monkeypatch):
    """Else all of them would have a context on the first one."""
    assert parallel.resolve_own_device("auto") == "cuda"
    assert cards == [1, "auto"]
    cards.clear()
    assert parallel.resolve_own_device("cpu") == "cuda"
    assert cards == ["cpu"]
    cards.clear()
    resolve_run([f"target={folder}", f"out={tmp_path / 'out'}", "data=x"])
    assert cards == [1, "auto"]
    cards.clear()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    parallel.resolve_own_device("cuda:1")
    assert cards == ["cuda:1"]


@pytest.mark.parametrize(
    ("device", "local", "reason"),
    [
        ("cuda:0", "1", "device is 'cuda:0', and 2 processes train together"),
        ("auto", "2", "LOCAL_RANK is '2', and CUDA finds 2 GPUs; start at most one process"),
        ("cuda", "x", "LOCAL_RANK is 'x'"),
    ],
)
def test_processes_that_would_share_a_card_are_refused(device, local, reason, cards, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", local)
    with pytest.raises(ConfigError, match=reason):
        parallel.resolve_own_device(device)
    assert cards == []


def test_a_target_that_each_process_would_spread_is_refused(tmp_path):
    config = small_config(tmp_path, device_map="auto", tau_limit=0)
    parallel.check_sharing(config, 1)
    with pytest.raises(ConfigError, match=r"device_map spreads the target .* each of 2 processes"):
        parallel.check_sharing(config, 2)


LAUNCHERS = {
    "torchrun": "torch.distributed.run --nproc-per-node 2 --master-port",
    # Its own way for CPUs needs mpirun; what is for GPUs starts the processes as torchrun does.
    "accelerate": "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 "
    "--mixed_precision no --dynamo_backend no --main_process_port",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_both_launchers_start_one_run(tmp_path, launcher):
    config = small_config(tmp_path, max_steps=4)
    alone = train(config)
    parted = dataclasses.replace(config, out=tmp_path / "parted")
    start = [sys.executable, "-m", *LAUNCHERS[launcher].split(), free_port()]
    command = [*start, "-m", "blockdraft.train", *settings_of(parted)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "processes: 2" in ended.stderr
    assert ended.stdout.split() == [str(parted.out / "drafter")]
    assert_same_run(parted.out, alone.drafter.parent)


@pytest.mark.parametrize("what", ["target", "drafter"])
def test_nothing_can_be_shared_with_nobody(tmp_path, what):
    config = small_config(tmp_path, **{f"shard_{what}": True})
    with pytest.raises(ConfigError, match=f"shares the {what} .* start several with torchrun"):
        train(config)
    assert not config.out.exists()


def test_a_device_map_changes_nothing_but_the_place(tmp_path):
    config = small_config(tmp_path, max_steps=2)
    plain = train(config)
    mapped = train(dataclasses.replace(config, out=tmp_path / "mapped", device_map="auto"))
    assert [r["nll"] for r in logged(mapped.drafter.parent)] == [
        r["nll"] for r in logged(plain.drafter.parent)
    ]
