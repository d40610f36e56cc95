"""What `bench` and its like refuse before they measure, and what they say when they are ended."""

import json
from pathlib import Path

import pytest

from blockdraft.bench.speed.bench import SpeedJournal
from blockdraft.cli.output import check_not_read
from tests.command_line import refusal


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Explain rain."}\n', encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["speed", "--prompts"],
        ["speed", "--force-acceptance", "0", "--prompts"],
        ["concurrency", "--prompts"],
        ["never-slower", "--prompts"],
        ["traffic", "--prompts"],
        ["pareto", "--prompts"],
        ["context", "--text"],
    ],
)
def test_no_report_is_written_over_prompts(prompts, command, monkeypatch):
    before = prompts.read_bytes()
    monkeypatch.chdir(prompts.parent)
    said = refusal("bench", *command, prompts, "--output", "mine.jsonl")
    assert said.endswith("cannot write mine.jsonl: this command reads it; name another file")
    assert prompts.read_bytes() == before


def test_nor_through_a_link(prompts):
    link = prompts.with_name("report.json")
    link.symlink_to(prompts)
    assert "this command reads it" in refusal(
        "bench", "speed", "--prompts", prompts, "--output", link
    )


def test_what_is_no_file_may_be_read_and_written():
    check_not_read(Path("/dev/null"), [Path("/dev/null")])


@pytest.mark.parametrize("command", ["speed", "concurrency"])
def test_nor_is_the_picture_of_a_ledger(prompts, command):
    arguments = ["bench", command, "--prompts", prompts, "--ledger", "--waterfall", prompts]
    assert "this command reads it" in refusal(*arguments)


@pytest.mark.parametrize("command", ["speed", "concurrency", "never-slower", "traffic", "pareto"])
def test_nor_is_a_report_written_over_the_file_of_a_set(prompts, command):
    path = prompts.rename(prompts.with_name("humaneval.jsonl"))
    sets = ["--prompts", "humaneval", "--sets", path.parent]
    assert "this command reads it" in refusal("bench", command, *sets, "--output", path)


@pytest.mark.parametrize(
    "command", [("prove", "--output"), ("prove", "--html"), ("explain", "--html")]
)
def test_nor_is_a_page_or_a_certificate(prompts, command):
    name, option = command
    assert "this command reads it" in refusal(name, "--prompts", prompts, option, prompts)


def test_no_plan_or_page_is_written_over_a_result(tmp_path):
    result = tmp_path / "pareto.json"
    result.write_text(json.dumps({"result": "pareto", "result_version": 1}), encoding="utf-8")
    goal = ["--max-tpot", 50, "--requests-per-second", 1]
    for command in (["plan", result, *goal, "--output"], ["report", tmp_path, "--html"]):
        assert "this command reads it" in refusal("bench", *command, result)


@pytest.mark.parametrize("option", ["--against-model", "--assistant"])
def test_options_of_other_engines_are_refused_without_one(prompts, option):
    said = refusal("bench", "speed", "--prompts", prompts, option, "some")
    assert said.endswith(f"{option} is for other engines; name them with --against")


def test_a_run_that_keeps_nothing_only_says_that_it_was_interrupted(tmp_path):
    assert SpeedJournal().how_to_go_on() == "interrupted"
    journal = SpeedJournal(tmp_path / "x.json.part.jsonl", {})
    assert "the same command resumes it" in journal.how_to_go_on()
    journal.remove()
    assert journal.how_to_go_on() == "interrupted"


def test_a_text_that_is_missing_is_told_in_words():
    said = refusal("bench", "context", "--text", "absent.txt")
    assert said.endswith(
        "cannot read absent.txt: No such file or directory; give a text file in UTF-8"
    )
