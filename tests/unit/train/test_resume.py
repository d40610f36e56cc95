"""A run that was broken off goes on as if it had not been (reference case 32)."""

import dataclasses
import shutil
import subprocess
import sys
import time
from tempfile import gettempdir

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from blockdraft.core.errors import ConfigError, DiskError
from blockdraft.core.files import LOCK, folder_lock
from blockdraft.models.draft.checkpoint import read_provenance
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.hydra_head import HEAD_NAME
from blockdraft.models.fingerprint import weights_sha256
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME
from blockdraft.train import prepare, run_folder, training_run
from blockdraft.train.hydra.state import HEAD_STATE
from blockdraft.train.run_folder import RunFolder
from blockdraft.train.run_log import best_of, evaluations, read_log
from blockdraft.train.run_state import STATE, read_state, saved_step
from blockdraft.train.trainer import train
from blockdraft.train.true_tau import RealDecoding, TrueTau
from tests.train_runs import broken_off, logged, settings_of, small_config, write_answers

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("changes", [{}, {"accumulate": 3}, {"pack_len": 1024}], ids=str)
@pytest.mark.parametrize("cached", [False, True])
def test_a_broken_off_run_goes_on_as_if_it_had_not_been(config, cached, changes):
    config = dataclasses.replace(config, save_steps=3, eval_steps=4, **changes)
    if cached:
        config = dataclasses.replace(config, feature_cache=config.out.parent / "cache")
    train(config)
    parts = dataclasses.replace(config, out=config.out.parent / "parts")
    with broken_off(7):  # The state is that of the seventh step, the last evaluation of the fourth.
        train(parts)
    assert [row["step"] for row in logged(parts.out)] == list(range(1, 8))
    train(parts)
    for a, b in zip(logged(config.out), logged(parts.out), strict=True):
        assert (a["step"], a["nll"], a["lr"]) == (b["step"], b["nll"], b["lr"])
    assert [row["step"] for row in evaluations(parts.out)] == [0, 4, 8, 10]
    # The best drafter may be that of the beginning; the last one holds the averages.
    one, two = (
        DraftModel.from_pretrained(run.out / "last").state_dict() for run in (config, parts)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("at", "best"), [("add", 4), ("log", 4), ("_save", 4), ("keep_best", 6)], ids=str
)
def test_the_best_drafter_is_never_one_that_a_killed_run_forgot(config, at, best, monkeypatch):
    """Killed in the evaluation of step 6, which is the best only the first time that it is made."""
    scores = {0: 1.0, 2: 2.0, 4: 3.0, 6: 5.0, 8: 2.9, 10: 2.5}
    config = dataclasses.replace(config, eval_steps=2, save_minutes=1000.0)
    measure = training_run.TrainingRun._measure

    def scored(run, model):
        return measure(run, model) | {"true_tau": {"all": scores[run.step]}}

    monkeypatch.setattr(training_run.TrainingRun, "_measure", scored)
    owner = training_run.TrainingRun if at == "_save" else RunFolder
    with monkeypatch.context() as patch:
        patch.setattr(owner, at, dies_in(getattr(owner, at), config.out))
        with pytest.raises(KeyboardInterrupt):
            train(config)
    scores[6] = 0.5
    result = train(config)
    assert [row["step"] for row in result.evaluations] == [0, 2, 4, 6, 8, 10]
    assert result.best["step"] == best
    assert read_provenance(config.out / "drafter")["result"] == result.best
    assert read_provenance(config.out / "last")["result"] == result.evaluations[-1]
    scores[best] = 9.0
    straight = train(dataclasses.replace(config, out=config.out.parent / "straight"))
    assert weights_sha256(result.drafter) == weights_sha256(straight.drafter)


def dies_in(method, out):
    """The method, but that the process is killed in it at step 6, before anything is done."""

    def dying(self, *args):
        if [row for row in read_log(out) if row["step"] == 6]:
            raise KeyboardInterrupt
        return method(self, *args)

    return dying


def row(step, true_tau, on="", tau=1.0, loss=1.0):
    held_out = {"tau": tau, "loss": loss}
    return {"step": step, "true_tau": true_tau, "held_out": held_out, "measured_on": on}


def test_the_best_is_chosen_among_evaluations_of_the_same_prompts():
    one, nine, two, less = ({"all": tau} for tau in (1.0, 9.0, 2.0, 1.5))
    rows = [row(0, one, "a"), row(1, nine, "a"), row(2, two, "b"), row(3, less, "b")]
    assert best_of(rows)["step"] == 2
    assert best_of(rows[:2])["step"] == 1


def test_between_equals_the_better_drafter_offline_is_kept():
    """Decoding a few prompts often gives no difference; the untrained drafter is no choice then."""
    one, two = {"all": 1.0}, {"all": 2.0}
    assert best_of([row(0, one), row(1, one, tau=1.5)])["step"] == 1
    assert best_of([row(0, one), row(1, one, loss=0.5), row(2, one, loss=0.7)])["step"] == 1
    assert best_of([row(0, two), row(1, one, tau=1.5)])["step"] == 0
    assert best_of([row(0, one), row(1, one)])["step"] == 0
    assert best_of([row(0, {}, tau=2.0), row(1, {}, tau=3.0)])["step"] == 1


@pytest.mark.slow
def test_a_killed_process_loses_at_most_the_last_interval(config):
    config = dataclasses.replace(config, save_steps=2, max_steps=60)
    train(config)
    parts = dataclasses.replace(config, out=config.out.parent / "parts")
    command = [sys.executable, "-m", "blockdraft.cli.main", "train", *settings_of(parts)]
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
    with pytest.raises(ConfigError, match=r"another lr \(now 1.0, before 0.00"):
        train(dataclasses.replace(config, lr=1.0))


def test_a_run_goes_on_in_another_place_with_more_texts(config):
    """Folders may move, and answers come in while the drafter is trained."""
    first = train(dataclasses.replace(config, feature_cache=config.out.parent / "cache"))
    base = config.out.parent / "moved"
    base.mkdir()
    for name in ("run", "llama-target", "answers.jsonl", "cache"):
        (config.out.parent / name).rename(base / name)
    more = write_answers(base / "more.jsonl", 12, seed=1)
    moved = small_config(
        base, data=(base / "answers.jsonl", more), feature_cache=base / "cache", max_steps=14
    )
    result = train(moved)
    assert result.num_steps == 14
    rows = logged(moved.out)
    assert [row["step"] for row in rows] == list(range(1, 15))
    # Another pass begins, in which every text occurs once more.
    assert rows[10]["epoch"] == rows[9]["epoch"] + 1
    assert result.evaluations[: len(first.evaluations)] == first.evaluations


def test_two_runs_do_not_share_a_folder(config):
    with folder_lock(config.out), pytest.raises(ConfigError, match="another process is writing"):
        train(config)
    assert train(config).num_steps == 10


def test_a_target_of_other_weights_is_another_run(config):
    train(config)
    path = config.target / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match="a target of other weights; give a new folder"):
        train(config)


def test_texts_that_use_the_mask_token_are_another_run(config, monkeypatch):
    """The mask token is chosen by the texts; a drafter learns one."""
    train(config)
    monkeypatch.setattr(prepare, "unused_special_token", lambda *_: 255)
    with pytest.raises(ConfigError, match="another mask token; give a new folder"):
        train(config)


def test_a_state_that_the_disk_does_not_give_is_not_to_be_deleted(tmp_path):
    (tmp_path / "state.pt").mkdir()
    with pytest.raises(DiskError, match=r"cannot read .*state\.pt: Is a directory; fix its disk"):
        read_state(tmp_path / "state.pt", set(), "delete it")


def test_a_damaged_state_is_refused_with_its_remedy(config):
    train(config)
    state = config.out / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"state\.pt is damaged.*delete it"):
        train(config)
    torch.save({"config": config.to_dict()}, state)
    with pytest.raises(ConfigError, match="lacks drafter"):
        train(config)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("config", None),
        ("optimizer", {"step": 3}),
        ("optimizer", [torch.zeros(2)]),
        ("generator", torch.zeros(3)),
        ("step", "three"),
        ("evaluated", None),
        ("seconds", {}),
    ],
)
def test_a_state_with_other_contents_is_refused_with_its_remedy(config, name, value):
    """Such as one of another version, or a file that somebody has written in its place."""
    train(config)
    state = config.out / "state.pt"
    torch.save(torch.load(state, weights_only=True) | {name: value}, state)
    with pytest.raises(ConfigError, match=r"state\.pt is damaged \(\w+\); delete it to start over"):
        train(config)


def test_a_disk_that_fills_up_leaves_the_state_before(config, monkeypatch):
    train(config)
    before = (config.out / "state.pt").read_bytes()

    def full(state, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DiskError, match=r"No space left on device; .* resumes from the previous"):
        train(dataclasses.replace(config, max_steps=12))
    assert (config.out / "state.pt").read_bytes() == before
    assert not list(config.out.glob("*.part"))
    with pytest.raises(DiskError, match=r"MiB free; make space and start again, which starts over"):
        train(dataclasses.replace(config, out=config.out / "another"))


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
    with pytest.raises(DiskError, match="its disk is full; make space and start again"):
        train(config)


def test_a_full_disk_of_temporary_files_is_named_and_loses_no_step(config, monkeypatch):
    """Real decoding loads the drafter from there, in the middle of a run."""
    config = dataclasses.replace(config, tau_limit=1, tau_max_tokens=4, eval_steps=4, max_steps=6)
    monkeypatch.setattr(RealDecoding, "_measured", lambda *_: TrueTau(tau={}, speedup={}))
    monkeypatch.setattr(training_run, "write_expected", lambda *_: None)
    whole = dataclasses.replace(config, out=config.out.parent / "whole")
    train(whole)
    save = DraftModel.save_pretrained

    def is_full_later(model, folder, provenance=None):
        if provenance is None and any("nll" in row for row in read_log(config.out)):
            raise OSError(28, "No space left on device")
        save(model, folder, provenance)

    with monkeypatch.context() as patch:
        patch.setattr(DraftModel, "save_pretrained", is_full_later)
        with pytest.raises(DiskError, match=f"cannot write to {gettempdir()}.*: its disk is full"):
            train(config)
    assert saved_step(config.out / STATE) == 4
    train(config)
    rows, expected = logged(config.out), logged(whole.out)
    assert [row["nll"] for row in rows] == [row["nll"] for row in expected]
    steps = [[row["step"] for row in evaluations(run.out)] for run in (config, whole)]
    assert steps == [[0, 4, 6]] * 2


def test_other_errors_are_not_taken_for_a_full_disk(config, monkeypatch):
    monkeypatch.setattr(run_folder, "append_log", fails(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        train(config)


def test_a_hydra_head_beside_the_best_drafter_outlives_a_longer_run(config, monkeypatch):
    """A head takes an hour, and a run that goes on finds better drafters; a new run begins bare."""
    measure = training_run.TrainingRun._measure

    def better_each_time(run, model):
        return measure(run, model) | {"true_tau": {"all": 1.0 + run.step}}

    monkeypatch.setattr(training_run.TrainingRun, "_measure", better_each_time)
    head = train(config).drafter / HEAD_NAME
    head.write_bytes(b"a head")
    # Another one is in training.
    others = [head.with_name(name) for name in (LOCK, HEAD_STATE, f"{HEAD_STATE}.part")]
    for path in others:
        path.touch()
    result = train(dataclasses.replace(config, max_steps=12))
    assert result.best["step"] == 12
    assert read_provenance(result.drafter)["result"] == result.best
    assert head.read_bytes() == b"a head"
    assert all(path.exists() for path in others)
    assert (result.drafter / NGRAMS_NAME).exists()
    (config.out / training_run.STATE).unlink()
    train(config)
    assert not head.exists()


@pytest.mark.parametrize("deleted", [("drafter",), ("drafter", "last")], ids=str)
@pytest.mark.parametrize("max_steps", [10, 12])
def test_a_drafter_that_was_deleted_is_written_again(config, monkeypatch, deleted, max_steps):
    """The best one was that of the beginning, which no later evaluation brings back."""
    measure = training_run.TrainingRun._measure

    def worse_each_time(run, model):
        return measure(run, model) | {"true_tau": {"all": 9.0 - run.step}}

    monkeypatch.setattr(training_run.TrainingRun, "_measure", worse_each_time)
    train(config)
    for name in deleted:
        shutil.rmtree(config.out / name)
    result = train(dataclasses.replace(config, max_steps=max_steps))
    assert DraftModel.from_pretrained(result.drafter).config.block_size == 4
    assert (result.drafter / NGRAMS_NAME).exists()
    steps = [row["step"] for row in result.evaluations]
    assert steps == sorted(set(steps))


def test_a_finished_run_is_not_measured_again(config):
    first = train(config)
    again = train(config)
    assert again.num_steps == 10
    assert again.evaluations == first.evaluations
