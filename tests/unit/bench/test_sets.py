"""Sets of prompts by name."""

import gzip
import json
from pathlib import Path

import pytest

from blockdraft.bench.sets import SETS, read_prompts
from blockdraft.bench.workload import BenchPrompt
from blockdraft.core.errors import ConfigError
from blockdraft.data.boxed import BOXED_LINE
from tests.command_line import refusal, run, run_json


def write(path, *rows):
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def test_a_set_is_read_from_the_users_folder(tmp_path):
    write(tmp_path / "gsm8k_test.jsonl.gz", {"id": "1", "category": "math", "turns": ["two?"]})
    write(tmp_path / "bfcl_v4.jsonl", {"id": "2", "category": "tool-simple", "turns": ["area?"]})
    own = write(tmp_path / "own.jsonl", {"prompt": "left out"}, {"prompt": "mine"})
    assert read_prompts([Path("gsm8k"), Path("bfcl"), own], tmp_path, 1) == [
        BenchPrompt("1", "gsm8k", "two?" + BOXED_LINE),
        BenchPrompt("2", "tool-simple", "area?"),
        BenchPrompt("own-2", "own", "mine"),
    ]


def test_a_file_goes_before_a_set_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "gsm8k", {"prompt": "mine"})
    assert [prompt.text for prompt in read_prompts([Path("gsm8k")], None, None)] == ["mine"]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"gsm9k is neither a file nor a set; sets are gsm8k, "):
        read_prompts([Path("gsm9k")], tmp_path, None)
    with pytest.raises(ConfigError, match=r"gsm8k_test\.jsonl\.gz with --sets"):
        read_prompts([Path("gsm8k")], None, None)
    with pytest.raises(ConfigError, match=r"holds neither mbpp_sanitized_test\.jsonl nor"):
        read_prompts([Path("mbpp")], tmp_path, None)
    write(tmp_path / "aime25.jsonl")
    with pytest.raises(ConfigError, match=r"aime25\.jsonl holds no prompts"):
        read_prompts([Path("aime25")], tmp_path, None)


def test_an_unknown_set_is_refused_before_anything_is_loaded(tmp_path):
    arguments = ["bench", "speed", "--prompts", "gsm9k", "--sets", tmp_path, "--target", "x"]
    assert "neither a file nor a set" in refusal(*arguments)


def test_sets_are_listed_with_licence_and_source():
    listed = run_json("bench", "sets")
    assert [one["name"] for one in listed] == list(SETS)
    assert all(one["licence"] and one["source"] for one in listed)
    assert {one["name"] for one in listed if one["use"] == "paper"} == {
        *("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench")
    }
    assert "openai/human-eval" in run("bench", "sets").stdout
