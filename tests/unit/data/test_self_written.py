"""Prompts of the target's own: kept as they come, gone on with, and checked like all others."""

import json
import logging
from dataclasses import replace

import pytest

from blockdraft.core.errors import ConfigError
from blockdraft.data.config import DataConfig
from blockdraft.data.engine_answers import EngineWriter
from blockdraft.data.generate import generate_data
from blockdraft.data.shards import read_manifest

NUMBER = 40


@pytest.fixture
def config(folder, tmp_path):
    return DataConfig(
        output=tmp_path / "out",
        target=str(folder),
        num_self_written=NUMBER,
        max_tokens=4,
        slots=4,
        dtype="float32",
    )


def rows_of(config):
    lines = (config.output / "self_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def texts_of(config):
    return [row["turns"][0] for row in rows_of(config) if row["turns"]]


def test_how_many_came_out_is_said_and_counted(config, caplog):
    caplog.set_level(logging.INFO)
    shown = []
    generate_data(config, lambda progress: shown.append((progress.what, progress.num_jobs)))
    number = len(texts_of(config))
    assert 0 < number < NUMBER == len(rows_of(config))
    assert shown.count(("prompts", NUMBER)) == NUMBER
    assert f"{number} of {NUMBER} are usable" in caplog.text
    counts = read_manifest(config.output)["counts"]
    assert (counts["self_written_prompts"], counts["overlapping_self_written"]) == (number, 0)


def test_a_killed_run_keeps_the_prompts_that_it_wrote(config, monkeypatch):
    class Killed(BaseException):
        pass

    def few(self, jobs):
        for place, answer in enumerate(write(self, jobs)):
            if place == 25:
                raise Killed
            yield answer

    write = EngineWriter.write
    with monkeypatch.context() as patch:
        patch.setattr(EngineWriter, "write", few)
        with pytest.raises(Killed):
            generate_data(config)
    kept = rows_of(config)
    assert len(kept) == 25
    with (config.output / "self_prompts.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"id": "cut of')
    generate_data(config)
    assert rows_of(config)[:25] == kept
    assert len({row["id"] for row in rows_of(config)}) == NUMBER == len(rows_of(config))


def test_more_prompts_are_added_to_those_that_are_there(config):
    generate_data(config)
    kept = rows_of(config)
    generate_data(replace(config, num_self_written=NUMBER + 9))
    assert rows_of(config)[:NUMBER] == kept
    whole = replace(config, output=config.output.parent / "whole", num_self_written=NUMBER + 9)
    generate_data(whole)
    assert {row["id"] for row in rows_of(config)} == {row["id"] for row in rows_of(whole)}


def test_those_that_overlap_a_benchmark_are_left_out(config, tmp_path):
    generate_data(config)
    text = max(texts_of(config), key=len)
    exclude = tmp_path / "bench.jsonl"
    exclude.write_text(json.dumps({"prompt": text}) + "\n", encoding="utf-8")
    again = replace(config, output=tmp_path / "again", exclude=(exclude,))
    generate_data(again)
    assert texts_of(again) == texts_of(config)
    counts = read_manifest(again.output)["counts"]
    assert counts["overlapping_self_written"] >= 1
    answered = (again.output / "answers.jsonl").read_text(encoding="utf-8")
    (name,) = (row["id"] for row in rows_of(again) if row["turns"] == [text])
    assert f'"{name}"' not in answered
    assert f'"{name}"' in (config.output / "answers.jsonl").read_text(encoding="utf-8")


@pytest.mark.parametrize("row", ['{"id": "a", "set": 3}', '{"id": "a", "set": "b", "turns": 3}'])
def test_a_file_that_was_changed_is_refused(config, row):
    generate_data(config)
    (config.output / "self_prompts.jsonl").write_text(row + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"self_prompts\.jsonl, line 1: .*; delete that line"):
        generate_data(config)
