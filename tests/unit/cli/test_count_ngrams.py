"""`blockdraft count-ngrams`: a table beside a drafter that exists."""

import json
from pathlib import Path

from blockdraft.data.shards import write_manifest
from blockdraft.models.draft.checkpoint import write_provenance
from blockdraft.speculate.drafters import ngram_table
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME, NGramTable
from tests.command_line import refusal, run, run_json
from tests.rows import write_rows
from tests.tiny import tiny_drafter_folder


def answers_of(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    row = {"id": "a", "set": "s", "prompt_ids": [1, 2], "response_ids": [3, 4, 5, 3, 4, 6]}
    path.write_text(json.dumps(row))
    return path


def test_a_table_is_written_beside_the_weights(tmp_path: Path) -> None:
    folder = tiny_drafter_folder(tmp_path)
    found = run_json("count-ngrams", folder, answers_of(tmp_path))
    table = NGramTable.load(folder)
    assert table is not None
    assert (found["answers"], found["contexts"]) == (1, table.num_contexts)
    assert found["table"] == str(folder / NGRAMS_NAME)
    assert found["bytes"] == (folder / NGRAMS_NAME).stat().st_size


def test_it_is_said_where_not_all_answers_are_counted(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "answers.jsonl"
    rows = [
        {"id": str(number), "set": "s", "prompt_ids": [1, number], "response_ids": [3, 4, 5]}
        for number in range(3)
    ]
    write_rows(path, rows)
    folder = tiny_drafter_folder(tmp_path)
    for most, said in ((18, False), (12, True)):
        monkeypatch.setattr(ngram_table, "MAX_COUNTED", most)
        result = run("count-ngrams", folder, path)
        assert result.exit_code == 0
        assert ("first 2 answers only, which have 12 tokens" in result.stderr) == said


def test_a_folder_without_a_drafter_is_refused_and_not_made(tmp_path: Path) -> None:
    line = refusal("count-ngrams", tmp_path / "none", answers_of(tmp_path))
    assert str(tmp_path / "none") in line
    assert not (tmp_path / "none").exists()


def test_no_answers_are_refused(tmp_path: Path) -> None:
    folder, empty = tiny_drafter_folder(tmp_path), tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "no answer in" in refusal("count-ngrams", folder, empty)
    assert not (folder / NGRAMS_NAME).exists()


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    folder, path = tiny_drafter_folder(tmp_path), answers_of(tmp_path)
    path.write_text(path.read_text().replace("[1, 2]", "[1, 99999]"))
    line = refusal("count-ngrams", folder, path)
    assert "a token 99999" in line
    assert "another target wrote them" in line
    assert not (folder / NGRAMS_NAME).exists()


def test_a_folder_of_answers_of_another_target_is_refused(tmp_path: Path) -> None:
    """Also where its vocabulary is the same; what one of the two does not say refuses nothing."""
    folder, answers = tiny_drafter_folder(tmp_path), answers_of(tmp_path).parent
    target = {"sha256": "of files", "weights_sha256": "other", "folder": "fine-tuned"}
    row = json.loads((answers / "answers.jsonl").read_text())
    row |= {"temperature": 0.0, "sample": 0, "finish": "stop"}
    (answers / "answers.jsonl").write_text(json.dumps(row) + "\n")
    written = {"target": target, "template": {"sha256": ""}, "runs": []}
    write_provenance(folder, {"target": {"weights_sha256": "own"}})
    write_manifest(answers, written)
    line = refusal("count-ngrams", folder, answers)
    assert f"{answers} are of another target than that of {folder}, fine-tuned; give" in line
    assert not (folder / NGRAMS_NAME).exists()
    for said in ({**target, "weights_sha256": "own"}, {"sha256": "of files"}):
        write_manifest(answers, written | {"target": said})
        assert run("count-ngrams", folder, answers).exit_code == 0
