"""Several ways to draft in one run: every turn is asked, and a run that was ended goes on."""

import json
from pathlib import Path

import pytest

from tests.interrupts import interrupt_call
from tests.rows import write_rows
from tests.tiny import tiny_drafter_folder, tiny_target_folder
from tools.experiments import compare_ways

ROWS = [
    {"id": "a", "turns": ["the abc", "and then?"]},
    {"id": "b", "prompt": "ab the ab"},
]


@pytest.fixture
def arguments(tmp_path):
    prompts = tmp_path / "talk.jsonl"
    write_rows(prompts, ROWS)
    drafter = f"drafter={tiny_drafter_folder(tmp_path)},adaptive=false,lookup=false"
    options = ["--way", f"chain: {drafter},num_draft_tokens=3,draft_depth=3"]
    options += ["--way", f"tree: {drafter},num_draft_tokens=7,draft_depth=3"]
    options += ["--plain", f"target={tiny_target_folder(tmp_path)},dtype=float32,num_threads=1"]
    options += ["--prompts", str(prompts), "--limit", "5", "--max-tokens", "8"]
    return [*options, "--output", str(tmp_path / "ways.json")]


def compare(monkeypatch, arguments):
    monkeypatch.setattr("sys.argv", ["compare_ways.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        compare_ways.main()
    assert ended.value.code == 0
    return json.loads(Path(arguments[-1]).read_text(encoding="utf-8"))


def test_every_turn_is_asked_and_an_interrupted_run_goes_on(monkeypatch, arguments, tmp_path):
    whole = compare(monkeypatch, arguments)
    asked = [(row["id"], row["turn"]) for row in whole["prompts"]]
    assert asked == [("a", 1), ("a", 2), ("b", 1)]
    assert whole["num_resumed"] == 0
    assert list(whole["ways"]) == ["plain", "chain", "tree"]
    interrupt_call(monkeypatch, compare_ways, "encode_prompt", 3)
    with pytest.raises(KeyboardInterrupt):
        compare(monkeypatch, arguments)
    journal = tmp_path / "ways.json.part.jsonl"
    assert len(journal.read_text(encoding="utf-8").splitlines()) == 3
    again = compare(monkeypatch, arguments)
    assert again["num_resumed"] == 2
    assert again["prompts"] == whole["prompts"]
    assert not journal.exists()
