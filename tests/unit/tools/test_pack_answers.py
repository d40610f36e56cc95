"""Answers become parts of a recipe and come back from them; nothing is packed twice."""

import importlib.util
import json
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[3] / "tools" / "pack_answers.py"


@pytest.fixture
def tool(monkeypatch):
    spec = importlib.util.spec_from_file_location("pack_answers", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROWS_PER_PART", 3)
    return module


def answer(number, response=(5, 6)):
    row = {"id": f"p{number}", "set": "s", "temperature": 0.7, "sample": 0, "finish": "stop"}
    return row | {"prompt_ids": [1, number], "response_ids": list(response)}


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    with (folder / "answers.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_whole_parts_first_and_the_rest_when_asked_for(tool, tmp_path):
    answers, recipe = tmp_path / "answers", tmp_path / "recipe"
    recipe.mkdir()
    write(answers, [answer(n) for n in range(7)])
    names = [path.name for path in tool.pack(answers, recipe, with_rest=False)]
    assert names == ["answers-written-0.jsonl.gz", "answers-written-1.jsonl.gz"]
    assert tool.pack(answers, recipe, with_rest=False) == []
    write(answers, [answer(7)])
    (rest,) = tool.pack(answers, recipe, with_rest=True)
    assert rest.name == "answers-written-2.jsonl.gz"
    assert [row["id"] for row in tool.rows_of([rest])] == ["p6", "p7"]
    assert tool.pack(answers, recipe, with_rest=True) == []


def test_an_answer_that_was_written_anew_is_packed_as_it_is_now(tool, tmp_path):
    answers, recipe = tmp_path / "answers", tmp_path / "recipe"
    recipe.mkdir()
    write(answers, [answer(0), answer(1), answer(0, (7, 8, 9))])
    tool.pack(answers, recipe, with_rest=True)
    found = {row["id"]: row["response_ids"] for row in tool.rows_of(tool.parts_of(recipe))}
    assert found == {"p0": [7, 8, 9], "p1": [5, 6]}


def test_another_machine_goes_on_behind_the_parts(tool, tmp_path):
    answers, recipe, other = (tmp_path / name for name in ("answers", "recipe", "other"))
    recipe.mkdir()
    write(answers, [answer(n) for n in range(5)])
    tool.pack(answers, recipe, with_rest=True)
    write(other, [answer(4)])
    assert tool.restore(other, recipe) == 4
    assert tool.restore(other, recipe) == 0
    ids = [json.loads(line)["id"] for line in (other / "answers.jsonl").read_text().splitlines()]
    assert sorted(ids) == [f"p{n}" for n in range(5)]
