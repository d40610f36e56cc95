"""Two processes that share out the drafter by FSDP2 train as one that holds all of it."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import torch

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import epoch_batches
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train.prepare import read_data
from blockdraft.train.sharing import share_parameters
from blockdraft.train.trainer import train
from tests.parallel_runs import MUON_NOISE, PATIENCE, WAYS, assert_same_run, launch, outputs_of
from tests.tiny import tiny_drafter
from tests.train_runs import broken_off, logged, small_config, write_answers

SUM_NOISE = 1e-5
"""What another order of sums does to weights under AdamW in eight steps, ten times."""

ADAMW = {"optimizer": "adamw", "max_steps": 8, "save_steps": 3}


def shared_run(config, **changes):
    """The same run by two processes that share the drafter: (config, outputs)."""
    out = config.out.parent / "shared"
    shared = dataclasses.replace(config, out=out, shard_drafter=True, **changes)
    return shared, outputs_of(launch(shared, 2))


def assert_holds_half(outputs, folder):
    whole = sum(p.numel() for p in DraftModel.from_pretrained(folder).parameters())
    # Only the main process logs; every tensor of the tiny drafter has an even number of rows.
    assert f"of the drafter's parameters this process holds {whole // 2}\n" in outputs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_shared_drafter_learns_what_a_whole_one_learns(tmp_path, way):
    config = small_config(tmp_path, **ADAMW, **WAYS[way])
    if way == "a last batch of one row":
        assert len(read_data(config)[0]) % 3 == 1  # so that a process has none
    train(config)
    shared, outputs = shared_run(config)
    assert_same_run(shared.out, config.out, SUM_NOISE)
    assert_holds_half(outputs, shared.out / "last")
    assert "Warning" not in outputs[0][1] + outputs[1][1]


@pytest.mark.slow
def test_a_shared_drafter_of_dflash2(tmp_path):
    """The selector, whose weights come together apart from the layers, learns the same."""
    shape = {"conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
    config = small_config(tmp_path, **ADAMW, architecture="dflash2", **shape)
    train(config)
    shared, outputs = shared_run(config)
    assert_same_run(shared.out, config.out, SUM_NOISE)
    assert_holds_half(outputs, shared.out / "last")


@pytest.mark.slow
def test_muon_updates_whole_matrices(tmp_path):
    config = small_config(tmp_path, max_steps=8, tau_limit=1, tau_max_tokens=8)
    train(config)
    shared, _ = shared_run(config)
    assert_same_run(shared.out, config.out, MUON_NOISE)


@pytest.mark.slow
def test_processes_with_fewer_groups_of_blocks_keep_in_step(tmp_path):
    paths = tuple(
        write_answers(tmp_path / f"{length}.jsonl", 6, length, seed=length) for length in (3, 30)
    )
    config = small_config(
        tmp_path, **ADAMW, data=paths, min_response_len=2, batch_sequences=2, num_anchors=12
    )
    examples = read_data(config)[0]
    batches = epoch_batches(examples, 2, config.seed, 0, None)
    lengths = [{len(examples[i].response_ids) for row in batch for i in row} for batch in batches]
    assert {3, 30} in lengths  # one row has two blocks and the other one twelve
    assert len(batches) <= 8
    train(config)
    shared, _ = shared_run(config)
    assert_same_run(shared.out, config.out, SUM_NOISE)


@pytest.mark.slow
def test_target_and_drafter_may_both_be_shared(tmp_path):
    config = small_config(tmp_path, **ADAMW, batch_sequences=3, feature_cache=tmp_path / "cache")
    train(dataclasses.replace(config, feature_cache=None))
    shared, outputs = shared_run(config, shard_target=True)
    assert_same_run(shared.out, config.out, SUM_NOISE)
    assert_holds_half(outputs, shared.out / "last")
    assert "of the target's parameters this process holds" in outputs[0][1]


KILLED_AT_FIVE = """
import os
from blockdraft.train import training_run
step = training_run.TrainingRun.next_step
training_run.TrainingRun.next_step = lambda run: os._exit(9) if run.step == 5 else step(run)
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_with_as_many_processes_or_with_one(tmp_path):
    config = small_config(tmp_path, **ADAMW)
    train(config)
    whole = dataclasses.replace(config, out=tmp_path / "whole", shard_drafter=True)
    outputs_of(launch(whole, 2))
    parts = dataclasses.replace(whole, out=tmp_path / "parts")
    killed = launch(parts, 2, KILLED_AT_FIVE)
    for process in killed:
        process.communicate(timeout=PATIENCE)
    # The one that dies last may hear of the other's death before it comes to its own.
    assert 9 in [process.returncode for process in killed]
    assert all(process.returncode for process in killed)
    assert torch.load(parts.out / "state.pt", weights_only=True)["step"] == 3
    shutil.copytree(parts.out, tmp_path / "left by the killed")

    outputs_of(launch(parts, 2))
    names = ("step", "nll", "distill", "lr", "grad_norm")
    for a, b in zip(logged(whole.out), logged(parts.out), strict=True):
        assert [a[name] for name in names] == [b[name] for name in names]
    weights, others = (
        DraftModel.from_pretrained(run.out / "last").state_dict() for run in (whole, parts)
    )
    assert all(torch.equal(weights[name], others[name]) for name in weights)

    shutil.rmtree(parts.out)
    (tmp_path / "left by the killed").rename(parts.out)
    train(dataclasses.replace(parts, shard_drafter=False))
    assert_same_run(parts.out, config.out, SUM_NOISE)


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_shared(tmp_path):
    config = small_config(tmp_path, **ADAMW)
    train(config)
    shared = dataclasses.replace(config, out=tmp_path / "shared", shard_drafter=True)
    with broken_off(5):
        train(dataclasses.replace(shared, shard_drafter=False))
    outputs = outputs_of(launch(shared, 2))
    assert "continuing at step 3" in outputs[0][1]
    assert_same_run(shared.out, config.out, SUM_NOISE)


FAULTS = {
    "a mean instead of a sum": """
from torch.distributed.fsdp import FSDPModule
FSDPModule.set_gradient_divide_factor = lambda module, factor: None
""",
    "gradients that are not added up": """
from blockdraft.train import sharing
sharing._add_up_gradients = lambda shared: shared.set_requires_gradient_sync(False)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_sum_of_gradients_is_seen(tmp_path, fault):
    config = small_config(tmp_path, **ADAMW | {"max_steps": 2})
    train(config)
    shared = dataclasses.replace(config, out=tmp_path / "shared", shard_drafter=True)
    outputs_of(launch(shared, 2, FAULTS[fault]))
    with pytest.raises(AssertionError):
        assert_same_run(shared.out, config.out, SUM_NOISE)
    share = 0.5 if fault == "a mean instead of a sum" else 0.0
    right, wrong = (logged(folder)[0]["grad_norm"] for folder in (config.out, shared.out))
    assert wrong == pytest.approx(share * right, abs=1e-3)


def test_muon_refuses_more_processes_than_rows(tmp_path):
    model = tiny_drafter()
    many = SimpleNamespace(size=lambda: 1000)
    with pytest.raises(ConfigError, match=r"among 1000 processes.* only 32; use optimizer=adamw"):
        share_parameters(model, small_config(tmp_path), many)
