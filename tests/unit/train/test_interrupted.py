"""Ctrl-C ends a run in one line that says how it goes on; and the trainer's other ways to end."""

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace

import pytest

from blockdraft.core.errors import INTERRUPTED
from blockdraft.data import generate as data
from blockdraft.data.config import DataConfig
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train import prepare, stopping, training_run
from blockdraft.train.__main__ import main
from blockdraft.train.config import TrainConfig
from blockdraft.train.config_file import read_run
from blockdraft.train.keys import describe_keys
from blockdraft.train.run_log import evaluations
from blockdraft.train.run_state import saved_step
from blockdraft.train.stopping import Stopped, StopSignals
from blockdraft.train.trainer import train
from tests.command_line import run
from tests.interrupting_log import interrupting_log
from tests.serving import wait_until
from tests.tiny import TEXT_VOCAB_SIZE
from tests.train_runs import logged, settings_of, small_config


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path, save_steps=3, mask_token_id=TEXT_VOCAB_SIZE - 1)


def interrupt_at(monkeypatch, last):
    step = training_run.TrainingRun.next_step

    def interrupted(run):
        if run.step == last:
            raise KeyboardInterrupt
        step(run)

    monkeypatch.setattr(training_run.TrainingRun, "next_step", interrupted)


def interrupt_answers(monkeypatch, number):
    def interrupted(*args):
        signal.raise_signal(number)

    monkeypatch.setattr(data, "_write_answers", interrupted)


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (1, "interrupted before a state was saved; the same command starts over"),
        (5, "interrupted; the same command resumes from step 3"),
    ],
)
def test_a_run_that_is_broken_off_says_where_it_goes_on(config, monkeypatch, capsys, last, line):
    interrupt_at(monkeypatch, last)
    assert main(settings_of(config)) == INTERRUPTED
    assert capsys.readouterr().err.splitlines()[-1] == f"blockdraft: {line}"
    result = run("train", *settings_of(config), f"out={config.out}2")
    assert result.exit_code == INTERRUPTED
    assert result.stderr.splitlines()[-1] == f"blockdraft: {line}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_state_and_ends_with_its_status(config, number):
    """A program of its own; it goes on where it was, and makes the steps that it would have."""
    config = replace(config, save_steps=None, max_steps=100_000)
    command = [sys.executable, "-m", "blockdraft.train", *settings_of(config)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not steps_of(config.out):
            time.sleep(0.05)
        process.send_signal(number)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    done = steps_of(config.out)
    assert saved_step(config.out / training_run.STATE) == done[-1]
    assert f"resumes from step {done[-1]}" in said.splitlines()[-1]
    train(replace(config, max_steps=done[-1] + 2))
    assert steps_of(config.out) == [*range(1, done[-1] + 3)]


def steps_of(folder):
    return [row["step"] for row in logged(folder)] if (folder / "log.jsonl").exists() else []


def test_a_second_signal_ends_at_once():
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_may_come_while_the_log_is_written():
    with StopSignals() as stop, interrupting_log(stopping.logger, signal.SIGTERM, "step 1") as log:
        stopping.logger.info("step 1")
        assert stop.signal == signal.SIGTERM
        wait_until(lambda: "the run ends after this step" in log.text)


def test_a_signal_during_an_evaluation_ends_the_run(config, monkeypatch):
    monkeypatch.setattr(
        training_run.HeldOut,
        "evaluate",
        lambda self, model, tick: [signal.raise_signal(15), tick()],
    )
    with pytest.raises(Stopped):
        train(config)
    assert saved_step(config.out / training_run.STATE) == 0


@pytest.mark.parametrize("when", ["next_step", "_measure"])
def test_an_evaluation_that_a_signal_prevented_is_made_up_for(config, monkeypatch, when):
    """It is not made a step later, and neither are those behind it."""
    config = replace(config, eval_steps=4, save_steps=None)
    whole = getattr(training_run.TrainingRun, when)

    def signaled(run, *arguments):
        if run.step == (3 if when == "next_step" else 4):
            signal.raise_signal(15)
        return whole(run, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training_run.TrainingRun, when, signaled)
        with pytest.raises(Stopped):
            train(config)
    assert saved_step(config.out / training_run.STATE) == 4
    train(config)
    assert [row["step"] for row in evaluations(config.out)] == [0, 4, 8, 10]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_answers_that_are_broken_off(config, tmp_path, monkeypatch, number):
    """The system's own way to end at SIGTERM says nothing."""
    interrupt_answers(monkeypatch, number)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n', encoding="utf-8")
    output = tmp_path / "answers"
    for arguments in (
        ["data", "--target", config.target, "--output", output, "--prompts", prompts],
        ["train", *settings_of(config), f"answers.prompts={prompts}"],
    ):
        result = run(*arguments)
        assert result.exit_code == 128 + number, result.output
        assert "the same command generates the missing answers" in result.stderr
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert output.exists()


def test_a_sigterm_while_a_run_is_loaded_says_how_it_goes_on(config, monkeypatch, capsys):
    monkeypatch.setattr(
        prepare, "load_target_model", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    line = "interrupted before a state was saved; the same command starts over"
    assert main(settings_of(config)) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.splitlines()[-1] == f"blockdraft: {line}"
    result = run("train", *settings_of(config))
    assert result.exit_code == 128 + signal.SIGTERM
    assert result.stderr.splitlines()[-1] == f"blockdraft: {line}"


def test_the_trainer_alone_plans_and_writes_the_untrained_drafter(config, capsys):
    assert main([*settings_of(config)[:4], "--plan", *settings_of(config)[4:]]) == 0
    assert json.loads(capsys.readouterr().out)["steps"]["expected"] == 10
    assert not config.out.exists()
    assert main(["--init-only", *settings_of(config)]) == 0
    folder = capsys.readouterr().out.strip()
    assert folder.endswith("run/untrained")
    assert DraftModel.from_pretrained(folder).config.block_size == 4


@pytest.mark.parametrize("option", ["--help", "--nonsense"])
def test_options_of_the_trainer_alone_are_no_files(capsys, option):
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == (0 if option == "--help" else 2)
    said = capsys.readouterr()
    assert "usage: python -m blockdraft.train" in said.out + said.err


def test_the_keys_are_those_of_a_run_with_their_defaults(tmp_path, capsys):
    """What is printed is a run file, but for the three keys that have no default."""
    assert main(["--keys"]) == 0
    text = describe_keys()
    assert capsys.readouterr().out == text
    assert run("train", "--keys").stdout == text
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    given = ["target=a", "out=b", "data=c"]
    file = read_run(path, given)
    train = TrainConfig(target=file.train.target, data=file.train.data, out=file.train.out)
    assert file.train == train
    assert file.answers is None
    told = tomllib.loads(text)
    assert told.keys() == train.to_dict().keys() - {"target", "out", "data"}
    assert "# evaluated on them.\nheld_out_share = " in text
    assert '"muon"  # one of muon, adamw' in text
    # A "#" without a space hides a key.
    path.write_text(re.sub(r"^#(?! |\w+ =$)", "", text, flags=re.M), encoding="utf-8")
    answers = read_run(path, [*given, "answers.num_self_written=1"]).answers
    assert answers == DataConfig(
        output=answers.output, target="a", dtype=train.dtype, num_self_written=1
    )
    assert tomllib.loads(path.read_text())["answers"]["temperatures"] == [0.7]
