"""Answers in bulk: every prompt is answered once, resumed or not, and misuse is refused."""

import json

import pytest
import torch

from blockdraft.core.errors import DISK_FAILED
from blockdraft.data import engine_answers
from blockdraft.data.answers import LOOP_CHECK_EVERY, Job
from blockdraft.data.engine_answers import EngineWriter
from blockdraft.data.shards import read_manifest
from blockdraft.engine import load
from tests.command_line import run
from tests.rows import write_prompts
from tests.tiny import tiny_target, tiny_target_folder


def jobs(num, max_tokens):
    return [
        Job(id=str(i), set="s", prompt_ids=(1 + i, 2, 3), max_tokens=max_tokens, temperature=0.0)
        for i in range(num)
    ]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_engine_answers_as_the_model_would(kind):
    model = tiny_target(kind)
    writer = EngineWriter(model, stop_ids=(), slots=3, capacity=64, seed=0)
    answers = {int(answer.job.id): answer for answer in writer.write(jobs(8, 30))}
    assert sorted(answers) == list(range(8))
    oracle = tiny_target(kind)
    for answer in answers.values():
        ids = torch.tensor([answer.job.prompt_ids + answer.response_ids])
        expected = oracle(ids).logits[0, 2:-1].argmax(-1).tolist()
        assert list(answer.response_ids) == expected
        assert answer.finish in ("length", "loop")


def test_the_engine_cuts_an_answer_that_has_begun_to_loop():
    model = tiny_target()
    with torch.no_grad():
        model.lm_head.weight.zero_()  # every token ties, so the lowest id is said forever
    writer = EngineWriter(model, stop_ids=(), slots=3, capacity=400, seed=0)
    answers = list(writer.write(jobs(6, 300)))
    assert sorted(int(answer.job.id) for answer in answers) == list(range(6))
    for answer in answers:
        assert answer.finish == "loop"
        assert len(answer.response_ids) == 3 * LOOP_CHECK_EVERY


def test_sampled_answers_of_the_engine_follow_their_seed():
    def sampled(seed):
        writer = EngineWriter(tiny_target(), stop_ids=(), slots=2, capacity=64, seed=seed)
        two = [
            Job(id="a", set="s", prompt_ids=(1, 2), max_tokens=9, temperature=1.0, sample=n)
            for n in range(2)
        ]
        return {answer.job.sample: answer.response_ids for answer in writer.write(two)}

    first = sampled(0)
    assert first[0] != first[1]
    assert first == sampled(0)
    assert first != sampled(1)


def data(folder, output, *options):
    arguments = ["data", "--target", folder, "--output", output, "--max-tokens", 4, *options]
    return run(*arguments)


def prompts_of(tmp_path, num):
    return write_prompts(tmp_path / "prompts.jsonl", num)


def ids_in(output):
    lines = (output / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(json.loads(line)["id"] for line in lines)


def test_a_killed_run_goes_on_and_keeps_whole_rows(folder, tmp_path):
    prompts, output = prompts_of(tmp_path, 12), tmp_path / "out"
    options = ("--prompts", prompts, "--slots", 4)
    assert data(folder, output, *options).exit_code == 0
    everything = ids_in(output)
    assert len(everything) == 12
    path = output / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert data(folder, output, *options).exit_code == 0
    assert path.read_bytes().startswith(b"".join(lines[:5]))
    assert ids_in(output) == everything
    runs = read_manifest(output)["runs"]
    assert len(runs) == 2
    assert {"command", "git_commit", "versions", "machine", "config"} <= set(runs[0])


def test_a_full_disk_is_said(folder, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    prompts, output = prompts_of(tmp_path, 3), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr("blockdraft.data.generate.write_shards", full)
        result = data(folder, output, "--prompts", prompts)
    assert result.exit_code == DISK_FAILED
    assert "its disk is full; make space and start again" in result.stderr
    assert data(folder, output, "--prompts", prompts).exit_code == 0
    assert len(ids_in(output)) == 3


def test_too_long_prompts_are_left_out_and_said_so(folder, tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    path.write_text('{"prompt": "hi"}\n' + json.dumps({"prompt": "x" * 60}) + "\n")
    result = data(folder, output, "--prompts", path, "--max-prompt-tokens", 40, "--samples", 2)
    assert result.exit_code == 0
    assert set(ids_in(output)) == {"prompts-0"}
    assert "left out as too long: 1;" in result.stderr


def test_answers_that_only_an_earlier_run_asked_for_are_told_of(folder, tmp_path):
    output, prompts = tmp_path / "answers", prompts_of(tmp_path, 3)
    assert "earlier runs" not in data(folder, output, "--prompts", prompts).stderr
    again = data(folder, output, "--prompts", prompts, "--temperature", 0, "--temperature", 0.7)
    assert "earlier runs" not in again.stderr  # all that is there was asked for
    other = data(folder, output, "--prompts", prompts, "--temperature", 0.3)
    assert (
        "also holds 6 answers of earlier runs that this one did not ask for"
        in other.stderr.replace("\n", " ")
    )
    assert read_manifest(output)["counts"]["answers"] == 9


def test_short_answers_leave_room_for_self_written_prompts(folder, tmp_path):
    output = tmp_path / "out"
    assert data(folder, output, "--self-written", 40, "--max-prompt-tokens", 60).exit_code == 0
    assert (output / "self_prompts.jsonl").read_text(encoding="utf-8")


def test_a_bad_row_of_answers_is_named_with_a_remedy(folder, tmp_path):
    output = tmp_path / "out"
    output.mkdir()
    (output / "answers.jsonl").write_text('{"id": 3}\n', encoding="utf-8")
    result = data(folder, output, "--prompts", prompts_of(tmp_path, 1))
    assert result.exit_code == 2
    assert "answers.jsonl, line 1" in result.stderr


def test_other_self_written_prompts_than_before_are_refused(folder, tmp_path):
    output = tmp_path / "out"
    # Some must come out, and what a model of random weights writes depends on the processor.
    first = data(folder, output, "--self-written", 40)
    assert first.exit_code == 0, first.output
    assert data(folder, output, "--self-written", 40).exit_code == 0
    for options in (("--self-written", 5), ("--self-written", 40, "--seed", 1)):
        result = data(folder, output, *options)
        assert result.exit_code == 2
        assert "holds 40 self-written prompts of seed 0" in result.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--self-written", "-5"], "--self-written is -5"),
        (["--self-written", "2", "--limit", "0"], "limit is 0"),
        (["--self-written", "2", "--limit", "-5"], "limit is -5"),
        (["--self-written", "2", "--temperature", "-1"], "temperature is -1"),
        (["--self-written", "2", "--device", "foo"], "device 'foo'"),
        (["--prompts", "none.jsonl"], "none.jsonl"),
        (["--prompts", "/dev/null"], "holds no prompts"),
        ([], "nothing to answer"),
    ],
)
def test_a_refused_command_leaves_nothing_behind(folder, tmp_path, options, reason):
    result = data(folder, tmp_path / "out", *options)
    assert result.exit_code == 2
    # A busy machine has a line of its own before it.
    assert reason in result.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("row", ["[1, 2]", "3", '{"turns": "text"}', '{"turns": [[]]}'])
def test_bad_prompts_are_refused(folder, tmp_path, row):
    path = tmp_path / "prompts.jsonl"
    path.write_text(row + "\n", encoding="utf-8")
    result = data(folder, tmp_path / "out", "--prompts", path)
    assert result.exit_code == 2
    assert "prompts.jsonl, line 1" in result.stderr


def test_a_target_without_a_chat_template_is_refused(tmp_path):
    target = tiny_target_folder(tmp_path)
    (target / "chat_template.jinja").unlink()
    result = data(target, tmp_path / "out", "--self-written", 2)
    assert result.exit_code == 2
    assert "no chat template" in result.stderr


def test_an_output_that_is_a_file_is_refused(folder, tmp_path):
    path = prompts_of(tmp_path, 1)
    result = data(folder, path, "--prompts", path)
    assert result.exit_code == 2
    assert "is not a folder" in result.stderr


def test_answers_on_a_card_use_its_graphs(monkeypatch):
    """As the server does; steps of few rows take several times as long without."""
    asked = []
    monkeypatch.setattr(engine_answers, "use_static_shapes", asked.append)
    EngineWriter(tiny_target(), stop_ids=(), slots=3, capacity=64, seed=0)
    (target,) = asked
    monkeypatch.setattr(target, "use_static_shapes", lambda: asked.append("shapes"))
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(target, "device", torch.device(device))
        load.use_static_shapes(target)
    assert asked == [target, "shapes"]
