"""`blockdraft train`: the plan, the untrained drafter, a whole run from prompts, and its page."""

import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from blockdraft.cli.main import app
from blockdraft.core.errors import ConfigError
from blockdraft.models.draft import DraftModel
from blockdraft.train import trainer
from blockdraft.train.plan import plan_run
from blockdraft.train.report import MAX_POINTS, write_report
from blockdraft.train.run_log import LOG, append_log, forget_after, read_log
from blockdraft.train.trainer import train
from tests.tiny import TEXT_VOCAB_SIZE
from tests.train_runs import small_config


def run(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def run_file(path, config, **more):
    """The settings as a TOML file."""
    settings = {name: "none" if v is None else v for name, v in config.to_dict().items()} | more
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


def test_the_plan_says_what_the_run_will_be(config, tmp_path):
    path = run_file(tmp_path / "run.toml", config)
    result = run(path, "--plan", "--json", "max_steps=100")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["settings"]["max_steps"] == 100
    plan = told["plan"]
    result = train(config)
    model = DraftModel.from_pretrained(result.drafter)
    assert plan["parameters"] == sum(p.numel() for p in model.parameters())
    assert plan["drafter"] == model.config.to_dict()
    assert plan["answers"]["train"] + plan["answers"]["held_out"] == 24
    assert plan["tokens"]["of_answers"] == 30 * plan["answers"]["train"]
    assert plan["steps"] == {"expected": 100, "per_pass": round(plan["answers"]["train"] / 4)}
    assert plan["minutes"] == pytest.approx(plan["step_seconds"] * 100 / 60)
    people = run(path, "--plan")
    assert "parameters" in people.stdout
    assert "minutes" in people.stdout


def test_a_plan_counts_the_work_of_the_matrix_products(config, monkeypatch):
    """Against torch's own count of the gradients of one step."""
    config = dataclasses.replace(
        config, num_frequent=0, max_steps=1, num_anchors=24, batch_sequences=1
    )
    counts = []
    gradients = trainer._Run._gradients

    def counted(self, part, scale):
        with FlopCounterMode(display=False) as counter:
            stats = gradients(self, part, scale)
        counts.append(counter.get_total_flops())
        return stats

    monkeypatch.setattr(trainer._Run, "_gradients", counted)
    train(config)
    assert plan_run(config).step_flops == pytest.approx(counts[0], rel=0.25)


def test_an_untrained_drafter_has_the_final_layout(config, tmp_path):
    path = run_file(tmp_path / "run.toml", config)
    result = run(path, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    folder = json.loads(result.stdout)["drafter"]
    model = DraftModel.from_pretrained(folder)
    assert model.config.block_size == 4
    trained = train(config)
    names = {p.name for p in trained.drafter.iterdir()}
    assert {p.name for p in (config.out / "untrained").iterdir()} == names


def test_an_untrained_drafter_does_not_wait_for_answers(config, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(16)), encoding="utf-8"
    )
    path = run_file(
        tmp_path / "run.toml",
        dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1, draft_vocabulary=40),
    )
    result = run(path, "--dry-run", "--json", f"answers.prompts={tmp_path}/prompts.jsonl")
    assert result.exit_code == 0, result.output
    assert "the answers are not written yet" in result.stderr
    assert [entry.name for entry in config.out.iterdir()] == ["untrained"]
    model = DraftModel.from_pretrained(json.loads(result.stdout)["drafter"])
    assert model.draft_vocabulary is None


def test_from_prompts_to_a_working_pair(config, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(16)), encoding="utf-8"
    )
    path = run_file(
        tmp_path / "run.toml",
        dataclasses.replace(
            config, max_steps=2, tau_limit=2, tau_max_tokens=6, mask_token_id=TEXT_VOCAB_SIZE - 1
        ),
    )
    with path.open("a", encoding="utf-8") as file:
        file.write(f'[answers]\nprompts = ["{tmp_path}/prompts.jsonl"]\nmax_tokens = 24\n')
    before = run(path, "data=[]", "--plan", "--json")
    assert before.exit_code == 0, before.output
    expected = json.loads(before.stdout)["plan"]
    assert expected["answers"]["expected"] == 16
    people = run(path, "data=[]", "--plan")
    assert "begins by writing 16 answers" in people.stdout
    assert not (tmp_path / "run").exists()
    result = run(path, "data=[]")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith("run/drafter")
    assert "tau before" in result.stderr
    assert (tmp_path / "run" / "answers" / "manifest.json").exists()
    after = json.loads(run(path, "data=[]", "--plan", "--json").stdout)["plan"]
    assert after["answers"]["expected"] == 0
    assert after["parameters"] == expected["parameters"]
    # No more than was expected, and each prompt's tokens were counted.
    assert 16 < after["tokens"]["of_answers"] <= expected["tokens"]["of_answers"]
    assert after["tokens"]["all"] <= expected["tokens"]["all"]
    again = run(path, "data=[]", "--json")
    facts = json.loads(again.stdout)
    assert facts["best"]["true_tau"]["all"] >= 1


def test_a_plan_before_the_answers_counts_turns_samples_and_limits(config, tmp_path):
    rows = [{"turns": ["one", "two"]}, {"turns": ["three"]}]
    rows += [{"prompt": f"say {n}"} for n in range(8)]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )
    config = dataclasses.replace(config, mask_token_id=TEXT_VOCAB_SIZE - 1)
    path = run_file(tmp_path / "run.toml", config)
    with path.open("a", encoding="utf-8") as file:
        file.write(f'[answers]\nprompts = ["{tmp_path}/prompts.jsonl"]\nsamples = 3\n')
        file.write("temperatures = [0.0, 0.7]\nmax_tokens = 24\n")
    # Of the five that the limit draws none has a second turn.
    for changes, number in (((), 44), (("answers.max_turns=1",), 40), (("answers.limit=5",), 20)):
        result = run(path, "--plan", "--json", *changes)
        assert result.exit_code == 0, result.output
        plan = json.loads(result.stdout)["plan"]
        assert plan["answers"]["expected"] == number
        # The answers of `data` are there already, and are counted besides.
        assert plan["answers"]["train"] + plan["answers"]["held_out"] == 24 + number


def test_several_processes_want_their_answers_first(config, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    path = run_file(tmp_path / "run.toml", config)
    result = run(path, "answers.num_self_written=4")
    assert result.exit_code == 2
    assert "holds no finished answers" in result.stderr


def test_processes_divide_what_they_share(config, monkeypatch):
    monkeypatch.setattr("blockdraft.train.plan.measure_rate", lambda config, shape: 1e12)
    config = dataclasses.replace(config, batch_sequences=6, max_steps=100, max_minutes=None)
    alone = plan_run(config)
    monkeypatch.setenv("WORLD_SIZE", "4")
    whole = plan_run(config)
    assert whole.step_flops == alone.step_flops
    assert whole.minutes == pytest.approx(alone.minutes / 4)
    rows = ("features of a batch", "activations of a draft forward")
    of_drafter = ("drafter", "float32 masters, gradients and optimizer")
    for name, size in alone.memory.items():
        # Two of the six rows are the most that one of four processes gets.
        assert whole.memory[name] == (round(size / 3) if name in rows else size)
    shared = plan_run(dataclasses.replace(config, shard_drafter=True, shard_target=True)).memory
    for name in of_drafter:
        assert shared[name] == pytest.approx(alone.memory[name] / 4, rel=1e-3)
    assert alone.memory["target"] / 4 < shared["target"] < alone.memory["target"]
    assert {name: shared[name] for name in rows} == {name: whole.memory[name] for name in rows}


def test_a_plan_refuses_shares_of_nothing(config, monkeypatch):
    with pytest.raises(ConfigError, match="for a plan, set WORLD_SIZE"):
        plan_run(dataclasses.replace(config, shard_drafter=True))
    monkeypatch.setenv("WORLD_SIZE", "1000")
    with pytest.raises(ConfigError, match="Muon cannot update one that has only"):
        plan_run(dataclasses.replace(config, shard_drafter=True))


def test_a_step_that_outlasts_the_run_is_said(config, monkeypatch):
    monkeypatch.setattr("blockdraft.train.plan.measure_rate", lambda config, shape: 1.0)
    with pytest.raises(ConfigError, match="longer than the run"):
        plan_run(dataclasses.replace(config, max_minutes=1.0, max_steps=None))


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
    (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    text = write_report(folder).read_text(encoding="utf-8")
    assert "<b>" not in text
    assert "a&lt;" in text
    assert "-5.0%" in text
    assert "over millions of tokens seen" in text
    assert text.count(",") < 8 * (MAX_POINTS + 2)


def test_events_for_tensorboard(config):
    pytest.importorskip("tensorboard")
    train(dataclasses.replace(config, tensorboard=True, max_steps=2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.out))
    events.Reload()
    assert [event.step for event in events.Scalars("nll")] == [1, 2]
    assert events.Scalars("held_out/tau")[-1].value >= 1
    assert torch.isfinite(torch.tensor(events.Scalars("held_out/accuracy/1")[0].value))
