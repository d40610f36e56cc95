"""A run that was broken off goes on as if it had not been (reference case 32)."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest
import torch
from safetensors import SafetensorError

from blockdraft.core.errors import ConfigError
from blockdraft.models.draft import DraftModel
from blockdraft.train import trainer
from blockdraft.train.config import TrainConfig
from blockdraft.train.trainer import train
from tests.train_runs import broken_off, logged, small_config


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return small_config(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"accumulate": 3}, {"pack_len": 1024}], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_a_broken_off_run_goes_on_as_if_it_had_not_been(config, cached, changes):
    config = dataclasses.replace(config, save_steps=3, eval_steps=2, **changes)
    if cached:
        config = dataclasses.replace(config, feature_cache=config.out.parent / "cache")
    train(config)
    parts = dataclasses.replace(config, out=config.out.parent / "parts")
    with broken_off(8):
        train(parts)
    assert [row["step"] for row in logged(parts.out)] == list(range(1, 9))
    train(parts)
    for a, b in zip(logged(config.out), logged(parts.out), strict=True):
        assert (a["step"], a["nll"], a["lr"]) == (b["step"], b["nll"], b["lr"])
    # The best drafter may be that of the beginning; the last one holds the averages.
    one, two = (
        DraftModel.from_pretrained(run.out / "last").state_dict() for run in (config, parts)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_last_interval(config):
    config = dataclasses.replace(config, save_steps=2, max_steps=60)
    train(config)
    parts = dataclasses.replace(config, out=config.out.parent / "parts")
    values = parts.to_dict().items()
    settings = [f"{name}={'none' if v is None else json.dumps(v)}" for name, v in values]
    command = [sys.executable, "-m", "blockdraft.cli.main", "train", *settings]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    log = parts.out / "log.jsonl"
    while not (parts.out / "state.pt").exists() or log.read_text().count("nll") < 9:
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    done = len(logged(parts.out))
    assert done < 60
    state = torch.load(parts.out / "state.pt", weights_only=True)
    assert done - state["step"] <= 2
    train(parts)
    for a, b in zip(logged(config.out), logged(parts.out), strict=True):
        assert (a["step"], a["nll"]) == (b["step"], b["nll"])


def test_a_state_of_other_settings_is_refused(config):
    train(config)
    with pytest.raises(ConfigError, match="another lr"):
        train(dataclasses.replace(config, lr=1.0))


def test_a_damaged_state_is_refused_with_its_remedy(config):
    train(config)
    state = config.out / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"state\.pt is damaged.*delete it"):
        train(config)
    torch.save({"config": config.to_dict()}, state)
    with pytest.raises(ConfigError, match="lacks epoch"):
        train(config)


def test_a_disk_that_fills_up_leaves_the_state_before(config, monkeypatch):
    train(config)
    before = (config.out / "state.pt").read_bytes()

    def full(state, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(ConfigError, match=r"No space left on device; .* MiB free; make room"):
        train(dataclasses.replace(config, max_steps=12))
    assert (config.out / "state.pt").read_bytes() == before
    assert not list(config.out.glob("*.part"))


def fails(error):
    def write(*args, **kwargs):
        raise error

    return write


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        SafetensorError("I/O error: No space left on device (os error 28)"),
    ],
    ids=["system", "safetensors"],
)
def test_a_full_disk_is_said_whatever_was_written(config, monkeypatch, error):
    monkeypatch.setattr(DraftModel, "save_pretrained", fails(error))
    with pytest.raises(ConfigError, match="its disk is full; make room and start again"):
        train(config)


def test_other_errors_are_not_taken_for_a_full_disk(config, monkeypatch):
    monkeypatch.setattr(trainer, "append_log", fails(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        train(config)


def test_a_finished_run_is_not_measured_again(config):
    first = train(config)
    again = train(config)
    assert again.num_steps == 10
    assert again.evaluations == first.evaluations
