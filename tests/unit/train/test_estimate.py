"""`blockdraft train`: the plan, the untrained drafter, a whole run from prompts, and its page."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from blockdraft.cli.train import _print_result
from blockdraft.core.errors import ConfigError
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME, NGramTable
from blockdraft.train import estimate, training_run
from blockdraft.train.advice import (
    LEAST_ANSWERS,
    LEAST_HELD_OUT,
    LEAST_STEPS,
    below_plain,
    few_steps,
    few_texts,
)
from blockdraft.train.batches import Batches
from blockdraft.train.estimate import estimate_run
from blockdraft.train.report import MAX_POINTS, NUM_COLORS, write_report
from blockdraft.train.run_log import LOG, append_log, forget_after, read_log
from blockdraft.train.trainer import train
from blockdraft.train.training_run import TrainResult
from tests.command_line import run, run_json
from tests.rows import write_prompts, write_rows
from tests.tiny import TEXT_VOCAB_SIZE


def run_file(path, config, **more):
    """The settings as a TOML file."""
    settings = {name: "none" if v is None else v for name, v in config.to_dict().items()} | more
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_plan_says_what_the_run_will_be(config, tmp_path):
    path = run_file(tmp_path / "run.toml", config)
    told = run_json("train", path, "--plan", "max_steps=100")
    assert told["settings"]["max_steps"] == 100
    plan = told["plan"]
    result = train(config)
    model = DraftModel.from_pretrained(result.drafter)
    assert plan["parameters"] == sum(p.numel() for p in model.parameters())
    assert plan["drafter"] == model.config.to_dict()
    assert plan["answers"]["train"] + plan["answers"]["held_out"] == 24
    assert plan["tokens"]["of_answers"] == 30 * plan["answers"]["train"]
    assert plan["steps"] == {"expected": 100, "per_pass": round(plan["answers"]["train"] / 4)}
    assert plan["minutes"] == pytest.approx(plan["step_seconds"] * 100 / 60, rel=0.01)
    people = run("train", path, "--plan")
    assert "parameters" in people.stdout
    assert "minutes" in people.stdout


def test_a_plan_times_steps_alone_and_leaves_nothing(config, monkeypatch):
    for name in ("HeldOut", "describe_target", "real_decoding"):
        monkeypatch.setattr(
            training_run, name, lambda *_, name=name: pytest.fail(f"{name} is no step")
        )
    clock = iter(range(100))
    monkeypatch.setattr(training_run.time, "monotonic", lambda: float(next(clock)))
    told = estimate_run(dataclasses.replace(config, max_steps=90))
    # A step reads the clock twice itself, and the estimate before and behind it.
    assert told.step_seconds == 3.0
    assert told.minutes == pytest.approx(90 * 3 / 60)
    assert not config.out.exists()


def test_a_plan_of_answers_to_come_times_texts_of_their_length(config, monkeypatch, tmp_path):
    seen = []
    draw = Batches.draw

    def drawn(*args):
        part = draw(*args)
        seen.append(part.batch.token_ids.shape)
        return part

    monkeypatch.setattr(Batches, "draw", drawn)
    write_prompts(tmp_path / "prompts.jsonl", 40)
    config = dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1)
    path = run_file(tmp_path / "run.toml", config, data=[])
    with path.open("a", encoding="utf-8") as file:
        file.write(f'[answers]\nprompts = ["{tmp_path}/prompts.jsonl"]\nmax_tokens = 50\n')
    plan = run_json("train", path, "--plan")["plan"]
    assert plan["step_seconds"] > 0
    texts, width = seen[0]
    assert len(seen) == 3
    assert texts == config.batch_sequences
    assert width == plan["tokens"]["all"] // plan["answers"]["train"]
    assert not config.out.exists()


def test_a_plan_and_a_run_warn_of_numbers_that_are_too_low(config, tmp_path, caplog):
    path = run_file(tmp_path / "run.toml", config)
    told = run_json("train", path, "--plan")["plan"]
    assert len(told["warnings"]) == 3
    for words, warning in zip(
        ("answers are too few to train on", "held-out answers are too few", "too few steps"),
        told["warnings"],
        strict=True,
    ):
        assert words in warning
    assert "Warning: too few steps to learn anything (10)" in " ".join(
        run("train", path, "--plan").stdout.split()
    )
    train(dataclasses.replace(config, max_steps=1))
    assert "too few steps to learn anything (1): raise max_minutes or max_steps" in caplog.text
    assert few_texts(LEAST_ANSWERS, LEAST_HELD_OUT) == ()
    assert few_steps(LEAST_STEPS) == few_steps(None) == ()


def test_a_run_by_the_clock_warns_once_it_knows_how_long_a_step_takes(config, caplog):
    train(dataclasses.replace(config, max_steps=6, max_minutes=1000.0))
    assert "too few steps to learn anything (6)" in caplog.text


def test_a_run_that_ends_below_plain_says_so_last(config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        training_run.TrainingRun,
        "_measure",
        lambda run, model: {
            "step": run.step,
            "held_out": {"tau": 1.0, "loss": 1.0, "marginal_tau": 1.0, "accuracy": [0.1]},
            "true_tau": {"all": 1.1},
            "speedup": {"all": 0.8},
            "minutes": 0.0,
            "tokens": 1,
        },
    )
    path = run_file(tmp_path / "run.toml", config)
    result = run("train", path, "max_steps=1")
    assert result.exit_code == 0, result.output
    words = "does not save time yet: with whole blocks, decoding runs at 0.80 of the speed of plain"
    assert words in result.stderr.splitlines()[-1]
    assert below_plain({"speedup": {"all": 1.0}}) is None
    assert below_plain({"speedup": {}}) is None


def test_an_untrained_drafter_has_the_final_layout(config, tmp_path):
    path = run_file(tmp_path / "run.toml", config)
    folder = run_json("train", path, "--init-only")["drafter"]
    model = DraftModel.from_pretrained(folder)
    assert model.config.block_size == 4
    trained = train(config)
    names = {p.name for p in trained.drafter.iterdir()}
    # N-grams are counted at the end of a run.
    assert {p.name for p in (config.out / "untrained").iterdir()} == names - {NGRAMS_NAME}
    assert NGramTable.load(trained.drafter).num_contexts > 0


def test_an_untrained_drafter_does_not_wait_for_answers(config, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 16)
    path = run_file(
        tmp_path / "run.toml",
        dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1, draft_vocabulary=40),
    )
    result = run(
        "train", path, "--init-only", "--json", f"answers.prompts={tmp_path}/prompts.jsonl"
    )
    assert result.exit_code == 0, result.output
    assert "the answers are not written yet" in result.stderr
    assert [entry.name for entry in config.out.iterdir()] == ["untrained"]
    model = DraftModel.from_pretrained(json.loads(result.stdout)["drafter"])
    assert model.draft_vocabulary is None


def test_from_prompts_to_a_working_pair(config, tmp_path):
    write_prompts(tmp_path / "prompts.jsonl", 16)
    path = run_file(
        tmp_path / "run.toml",
        dataclasses.replace(
            config, max_steps=2, tau_limit=2, tau_max_tokens=6, mask_token_id=TEXT_VOCAB_SIZE - 1
        ),
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(f'[answers]\nprompts = ["{tmp_path}/prompts.jsonl"]\nmax_tokens = 24\n')
    expected = run_json("train", path, "data=[]", "--plan")["plan"]
    assert expected["answers"]["expected"] == 16
    people = run("train", path, "data=[]", "--plan")
    assert "first generates 16 answers" in people.stdout
    assert not (tmp_path / "run").exists()
    result = run("train", path, "data=[]")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("run/drafter")
    assert "tau before" in result.stderr
    assert (tmp_path / "run" / "answers" / "manifest.json").exists()
    after = run_json("train", path, "data=[]", "--plan")["plan"]
    assert after["answers"]["expected"] == 0
    assert after["parameters"] == expected["parameters"]
    # No more than was expected, and each prompt's tokens were counted.
    assert 16 < after["tokens"]["of_answers"] <= expected["tokens"]["of_answers"]
    assert after["tokens"]["all"] <= expected["tokens"]["all"]
    assert run_json("train", path, "data=[]")["best"]["true_tau"]["all"] >= 1


def test_before_and_after_are_of_one_kind(capsys):
    """A run that decoded at first and goes on without: its offline tau was 1.25 then, not 3."""
    decoded = {"true_tau": {"all": 3.0}, "held_out": {"tau": 1.25}, "speedup": {"all": 2.0}}
    offline = {"true_tau": {}, "held_out": {"tau": 1.75}, "speedup": {}}
    for rows, shown in (((decoded, offline), ["1.25", "1.75"]), ((offline, decoded), ["3.00"])):
        result = TrainResult(drafter=Path("d"), num_steps=9, evaluations=rows, best=rows[1])
        _print_result(result, as_json=False)
        line = next(line for line in capsys.readouterr().err.splitlines() if " all " in line)
        assert re.findall(r"\d\.\d\d(?!x)", line) == shown


def test_a_plan_before_the_answers_counts_turns_samples_and_limits(config, tmp_path):
    rows = [{"turns": ["one", "two"]}, {"turns": ["three"]}]
    rows += [{"prompt": f"say {n}"} for n in range(8)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    config = dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1)
    path = run_file(tmp_path / "run.toml", config)
    with path.open("a", encoding="utf-8") as file:
        file.write(f'[answers]\nprompts = ["{tmp_path}/prompts.jsonl"]\nsamples = 3\n')
        file.write("temperatures = [0.0, 0.7]\nmax_tokens = 24\n")
    # Of the five that the limit draws none has a second turn.
    for changes, number in (((), 44), (("answers.max_turns=1",), 40), (("answers.limit=5",), 20)):
        plan = run_json("train", path, "--plan", *changes)["plan"]
        assert plan["answers"]["expected"] == number
        # The answers of `data` are there already, and are counted besides.
        assert plan["answers"]["train"] + plan["answers"]["held_out"] == 24 + number


def test_several_processes_want_their_answers_first(config, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = run_file(tmp_path / "run.toml", config)
    result = run("train", path, "answers.num_self_written=4")
    assert result.exit_code == 2
    assert "holds no finished answers" in result.stderr


def test_processes_divide_what_they_share(config, monkeypatch):
    timed = []

    def time_steps(config, texts, number):
        timed.append(config.batch_sequences)
        return [0.5]

    monkeypatch.setattr(estimate, "time_steps", time_steps)
    config = dataclasses.replace(config, batch_sequences=6, max_steps=100, max_minutes=None)
    alone = estimate_run(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    whole = estimate_run(config)
    assert timed == [6, 2]
    rows = ("features of a batch", "activations of a draft forward pass")
    of_drafter = ("drafter", "float32 masters, gradients and optimizer")
    for name, size in alone.memory.items():
        # Two of the six rows are the most that one of four processes gets.
        assert whole.memory[name] == (round(size / 3) if name in rows else size)
    shared = estimate_run(dataclasses.replace(config, shard_drafter=True, shard_target=True)).memory
    for name in of_drafter:
        assert shared[name] == pytest.approx(alone.memory[name] / 4, rel=1e-3)
    assert alone.memory["target"] / 4 < shared["target"] < alone.memory["target"]
    assert {name: shared[name] for name in rows} == {name: whole.memory[name] for name in rows}


def test_a_plan_refuses_shares_of_nothing(config, monkeypatch):
    with pytest.raises(ConfigError, match="for a plan, set WORLD_SIZE"):
        estimate_run(dataclasses.replace(config, shard_drafter=True))
    monkeypatch.setenv("WORLD_SIZE", "1000")
    with pytest.raises(ConfigError, match="Muon cannot update one that has only"):
        estimate_run(dataclasses.replace(config, shard_drafter=True))


def test_a_step_that_outlasts_the_run_is_said(config, monkeypatch):
    monkeypatch.setattr(estimate, "time_steps", lambda config, texts, number: [1000.0])
    with pytest.raises(ConfigError, match="longer than the run"):
        estimate_run(dataclasses.replace(config, max_minutes=1.0, max_steps=None))


def test_rows_of_steps_that_will_be_made_again_are_dropped(tmp_path):
    for step in range(5):
        append_log(tmp_path, {"step": step, "nll": 1.0})
    with (tmp_path / LOG).open("a", encoding="utf-8") as file:
        file.write('{"step": 9')
    forget_after(tmp_path, 2)
    assert [row["step"] for row in read_log(tmp_path)] == [0, 1, 2]


def test_the_page_stays_small_and_safe(tmp_path):
    folder = tmp_path / "<b>"
    folder.mkdir()
    rows = [{"step": n, "nll": 1 / n, "distill": 1.0, "lr": 0.1} for n in range(1, 3000)]
    held_out = {"tau": 2.0, "marginal_tau": 2.1, "loss": 1.0, "accuracy": [0.5, 0.25]}
    rows.insert(
        1500,
        {
            "step": 1500,
            "minutes": 1.0,
            "tokens": 3_000_000,
            "held_out": held_out,
            "true_tau": {"all": 1.9, "a<": 1.9},
            "speedup": {"all": 1.5},
        },
    )
    write_rows(folder / LOG, rows)
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "a&lt;" in text
    assert "-5.0%" in text
    assert "over millions of training tokens" in text
    assert text.count(",") < 8 * (MAX_POINTS + 2)


def test_a_single_evaluation_is_seen_and_curves_of_one_color_differ(tmp_path):
    sets = {f"set {number}": 1.0 + number for number in range(NUM_COLORS + 1)}
    row = {
        "step": 0,
        "minutes": 1.0,
        "held_out": {"tau": 2.0, "marginal_tau": 2.1, "loss": 1.0, "accuracy": [0.5]},
        "true_tau": {"all": 1.9},
        "speedup": sets,
    }
    (tmp_path / LOG).write_text(json.dumps(row) + "\n", encoding="utf-8")
    text = write_report(tmp_path).read_text(encoding="utf-8")
    dots = re.findall(r'<circle class="([^"]+)" cx="[\d.]+" cy="[\d.]+"', text)
    assert len(dots) == text.count("<polyline")
    looks = dots[-1 - len(sets) : -1]  # behind them, the share of right guesses
    assert len(set(looks)) == len(sets)


def test_events_for_tensorboard(config):
    pytest.importorskip("tensorboard")
    train(dataclasses.replace(config, tensorboard=True, max_steps=2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.out))
    events.Reload()
    assert [event.step for event in events.Scalars("nll")] == [1, 2]
    assert events.Scalars("held_out/tau")[-1].value >= 1
    assert torch.isfinite(torch.tensor(events.Scalars("held_out/accuracy/1")[0].value))
