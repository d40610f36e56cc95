"""Runs of `blockdraft data` on one folder: what the second may do, and what neither leaves."""

import datetime
import errno
import fcntl
import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from transformers.utils import chat_template_utils

from blockdraft.core.errors import ConfigError
from blockdraft.core.files import folder_lock
from blockdraft.data.config import DataConfig
from blockdraft.data.engine_answers import EngineWriter
from blockdraft.data.generate import generate_data
from blockdraft.data.history import is_answered
from blockdraft.data.shards import read_manifest, read_rows, write_manifest
from blockdraft.train.texts import are_written
from tests.command_line import run
from tests.rows import write_prompts, write_rows
from tests.tiny import CONTEXT, TEXT_VOCAB_SIZE, tiny_target_folder


@pytest.fixture
def config(folder, tmp_path):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 6)
    settings = {"output": tmp_path / "out", "target": str(folder), "prompts": (prompts,)}
    return DataConfig(**settings, max_tokens=4, slots=4, dtype="float32", temperatures=(0.0,))


def test_prompts_that_are_all_too_long_are_refused(config):
    with pytest.raises(ConfigError, match=r"all of 6 prompts have more than max_prompt_tokens 5"):
        generate_data(replace(config, max_prompt_tokens=5))
    assert not config.output.exists()


def test_prompts_that_all_overlap_a_benchmark_are_refused(config):
    with pytest.raises(ConfigError, match="no usable prompt is left"):
        generate_data(replace(config, exclude=config.prompts))
    assert not config.output.exists()


def test_more_tokens_than_the_context_holds_are_refused(config):
    # The two at their limits are as long as the context.
    generate_data(replace(config, max_prompt_tokens=CONTEXT - 4))
    longer = replace(config, max_prompt_tokens=CONTEXT - 3)
    with pytest.raises(ConfigError, match=f"more than the {CONTEXT} tokens of the target's"):
        generate_data(longer)


def test_a_run_that_answers_nothing_is_refused(config, monkeypatch):
    monkeypatch.setattr(EngineWriter, "write", lambda self, jobs: iter(()))
    with pytest.raises(ConfigError, match="none of 6 prompts was answered"):
        generate_data(config)


def test_answers_that_are_all_left_out_are_refused(config):
    # The tiny target ends no answer by itself.
    with pytest.raises(ConfigError, match=r"no answer in .* is usable for training .*truncated 6"):
        generate_data(replace(config, drop_truncated=True))
    assert "shards" not in read_manifest(config.output)


def test_answers_are_in_the_file_as_they_come(config):
    seen = []

    def count(progress):
        lines = (config.output / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        seen.append((len(lines), progress.num_answers))

    generate_data(config, count)
    assert seen == [(n, n) for n in range(1, 7)]


def test_a_refused_run_is_not_in_the_manifest(config, tmp_path):
    generate_data(config)
    before = read_manifest(config.output)
    (tmp_path / "other").mkdir()
    other = write_rows(tmp_path / "other" / "prompts.jsonl", [{"prompt": "else"}])
    with pytest.raises(
        ConfigError, match="an answer to a different prompt with the id 'prompts-0'"
    ):
        generate_data(replace(config, prompts=(other,)))
    assert read_manifest(config.output) == before


def test_more_tokens_answer_what_was_cut_off_anew(config):
    generate_data(config)
    generate_data(replace(config, max_tokens=9))
    rows = [row for _, row in read_rows(config.output)]
    assert [len(row["response_ids"]) for row in rows] == [9] * 6
    assert read_manifest(config.output)["counts"]["answers"] == 6
    path = config.output / "answers.jsonl"
    size = path.stat().st_size
    generate_data(config)
    assert path.stat().st_size == size
    assert [row for _, row in read_rows(config.output)] == rows
    manifest = read_manifest(config.output)
    del manifest["shards"]  # as while the run goes on
    write_manifest(config.output, manifest)
    unfinished = [row["response_ids"] for _, row in read_rows(config.output)]
    assert unfinished == [row["response_ids"] for row in rows]


def test_a_folder_that_grows_is_unfinished_until_it_has_grown(config, tmp_path, monkeypatch):
    """Its old shards lack answers: they would be trained on as if they were all."""
    generate_data(config)
    assert are_written(config)
    more = write_rows(tmp_path / "more.jsonl", [{"prompt": f"ask {n}"} for n in range(9)])
    grown = replace(config, prompts=(*config.prompts, more))
    answered = EngineWriter.write
    with monkeypatch.context() as patch:
        patch.setattr(EngineWriter, "write", lambda *args: dies_after(3, answered(*args)))
        with pytest.raises(KeyboardInterrupt):
            generate_data(grown)
    assert not are_written(config)
    assert len(list(read_rows(config.output))) == 9
    generate_data(grown)
    assert are_written(config)
    assert len(list(read_rows(config.output))) == 15


def dies_after(number, answers):
    yield from itertools.islice(answers, number)
    raise KeyboardInterrupt


def test_two_runs_on_one_folder_do_not_mix(config):
    generate_data(config)
    before = (config.output / "answers.jsonl").read_bytes()
    program = "import sys, pathlib, blockdraft.core.files as files\n"
    program += (
        "with files.folder_lock(pathlib.Path(sys.argv[1])): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(config.output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match="another process is writing there"):
            generate_data(replace(config, max_tokens=9))
        other.communicate("\n")
    assert (config.output / "answers.jsonl").read_bytes() == before
    generate_data(replace(config, max_tokens=9))


def test_a_lock_leaves_no_empty_folder(tmp_path):
    with folder_lock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    assert not (tmp_path / "a").exists()
    (tmp_path / "mine").mkdir()
    with folder_lock(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine").is_dir()
    with folder_lock(tmp_path / "full"):
        (tmp_path / "full" / "file").touch()
    assert (tmp_path / "full" / "file").exists()


def test_a_disk_without_locks_is_written_to_all_the_same(tmp_path, monkeypatch, caplog):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with folder_lock(tmp_path):
        (tmp_path / "file").touch()
    assert "cannot be locked ([Errno 37] No locks available)" in caplog.text


def joined(*arguments):
    return run("data", *arguments)


def answers_in(path, finishes):
    path.mkdir()
    manifest = {"target": {"sha256": "a"}, "template": {"sha256": "b"}, "runs": []}
    write_manifest(path, manifest)
    row = {"set": "s", "temperature": 0.0, "sample": 0, "prompt_ids": [1]}
    rows = [
        row | {"id": f"{path.name}{n}", "response_ids": [*range(n, n + 9)], "finish": finish}
        for n, finish in enumerate(finishes)
    ]
    write_rows(path / "answers.jsonl", rows)
    return path


def test_joining_leaves_out_what_it_is_told_to(tmp_path):
    one = answers_in(tmp_path / "a", ["stop", "length"])
    two = answers_in(tmp_path / "b", ["length"])
    for options, ids in (((), ["a0", "a1"]), (("--drop-truncated",), ["a0"])):
        result = joined("--join", one, "--join", two, "--output", tmp_path / "out", *options)
        assert result.exit_code == 0, result.output
        assert [row["id"] for _, row in read_rows(tmp_path / "out")] == ids
    result = joined("--join", two, "--output", tmp_path / "none", "--drop-truncated")
    assert result.exit_code == 2
    assert "no answer is left to join" in result.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "option",
    [
        *(["--prompts", "x"], ["--dataset", "x"], ["--self-written", "3"], ["--exclude", "x"]),
        *(["--limit", "3"], ["--thinking", "on"], ["--target", "x"], ["--temperature", "0.7"]),
        *(["--samples", "1"], ["--max-tokens", "256"], ["--max-prompt-tokens", "9"]),
        *(["--max-turns", "2"], ["--slots", "3"], ["--seed", "0"], ["--device", "cpu"]),
    ],
)
def test_joining_takes_no_options_of_writing(tmp_path, option):
    one = answers_in(tmp_path / "a", ["stop"])
    result = joined("--join", one, "--output", tmp_path / "out", *option)
    assert result.exit_code == 2
    assert f"--join writes no answers; leave out {option[0]}" in result.stderr
    assert not (tmp_path / "out").exists()


class OtherDay(datetime.datetime):
    """A day on which other tests do not run."""

    @classmethod
    def now(cls, tz=None):
        """Midnight."""
        return datetime.datetime(2031, 1, 2, tzinfo=tz)


def test_a_template_with_todays_date_goes_on_the_next_day(tmp_path, monkeypatch):
    target = tiny_target_folder(tmp_path)
    template = target / "chat_template.jinja"
    dated = "<|start|>system\nToday: {{ strftime_now('%d %b %Y') }}<|end|>\n"
    template.write_text(dated + template.read_text(encoding="utf-8"), encoding="utf-8")
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"id": "a", "prompt": "say one"}])
    config = DataConfig(
        output=tmp_path / "out",
        target=str(target),
        prompts=(prompts,),
        max_tokens=4,
        dtype="float32",
        temperatures=(0.0,),
    )
    generate_data(config)
    before = (config.output / "answers.jsonl").read_text(encoding="utf-8")
    monkeypatch.setattr(chat_template_utils, "datetime", OtherDay)
    generate_data(config)
    assert (config.output / "answers.jsonl").read_text(encoding="utf-8") == before
    write_rows(prompts, [{"id": "a", "prompt": "say two"}])
    with pytest.raises(ConfigError, match="a different prompt with the id 'a'"):
        generate_data(config)


def test_answers_in_another_template_are_not_those_that_are_asked_for(tmp_path):
    target = tiny_target_folder(tmp_path)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "say one"}])
    settings = {"output": tmp_path / "out", "target": str(target), "prompts": (prompts,)}
    config = DataConfig(**settings, max_tokens=4, dtype="float32", temperatures=(0.0,))
    generate_data(config)
    assert is_answered(config)
    template = target / "chat_template.jinja"
    template.write_text("<|start|>" + template.read_text(encoding="utf-8"), encoding="utf-8")
    assert not is_answered(config)
    with pytest.raises(ConfigError, match="answers made with another template"):
        generate_data(config)


def test_what_is_answered_needs_no_prompts_and_no_target(config):
    assert not is_answered(config)
    generate_data(config)
    assert is_answered(config)
    assert not is_answered(replace(config, max_tokens=5))
    prompts = config.prompts[0]
    write_prompts(prompts, 7)
    assert not is_answered(config)
    prompts.unlink()
    assert not is_answered(config)


def test_a_folder_in_use_keeps_its_answers(folder, tmp_path):
    """A second run would write the shards anew that the first one reads."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 60)
    settings = [f"target={folder}", f"out={tmp_path / 'run'}", "dtype=float32", "tau_limit=0"]
    settings += ["num_features=1", "block_size=2", "min_response_len=2", "held_out_share=0.2"]
    settings += [f"answers.prompts={prompts}", "answers.max_tokens=8"]
    settings += [f"mask_token_id={TEXT_VOCAB_SIZE - 1}"]
    with folder_lock(tmp_path / "run"):
        ended = run("train", *settings)
    assert "another process is writing there" in ended.stderr
    assert not (tmp_path / "run" / "answers").exists()


@pytest.mark.parametrize("cut", [1, 5])
def test_a_run_killed_in_a_line_loses_that_line_at_most(config, cut):
    generate_data(config)
    path = config.output / "answers.jsonl"
    lines = path.read_bytes()
    path.write_bytes(lines[:-cut])
    generate_data(replace(config, seed=1))
    assert sorted(path.read_bytes().splitlines()) == sorted(lines.splitlines())


@pytest.mark.parametrize(
    "changes",
    [
        {"id": None},
        {"id": [1]},
        {"set": None},
        {"finish": None},
        {"sample": "x"},
        {"response_ids": None},
        {"response_ids": [-5, 3]},
        {"response_ids": [1.5, 3]},
        {"prompt_ids": ["a"]},
    ],
    ids=str,
)
def test_an_answer_that_is_not_as_it_was_written_is_named(config, changes):
    generate_data(config)
    path = config.output / "answers.jsonl"
    row = json.loads(path.read_text().splitlines()[0])
    with path.open("a") as file:
        file.write(json.dumps({**row, "id": "other", **changes}) + "\n")
    manifest = read_manifest(config.output)
    del manifest["shards"]  # as while a run goes on
    write_manifest(config.output, manifest)
    for read in (lambda: generate_data(config), lambda: list(read_rows(config.output))):
        with pytest.raises(ConfigError, match=r"answers\.jsonl, line \d+: .* delete that line"):
            read()


@pytest.mark.parametrize(
    "changes",
    [{"template": None}, {"shards": [1]}, {"runs": [{"config": 3}]}, {"runs": 5}, {"target": 1}],
    ids=str,
)
def test_a_manifest_that_is_damaged_is_named(config, changes):
    generate_data(config)
    write_manifest(config.output, read_manifest(config.output) | changes)
    with pytest.raises(ConfigError, match=r"manifest\.json is "):
        read_manifest(config.output)
