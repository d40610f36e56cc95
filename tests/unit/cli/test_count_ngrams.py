"""`blockdraft count-ngrams`: a table beside a drafter that exists."""

import json
from pathlib import Path

from blockdraft.data import ngrams
from blockdraft.data.identity import target_sha256
from blockdraft.data.shards import write_manifest
from blockdraft.models.draft.checkpoint import write_provenance
from blockdraft.speculate.drafters.ngram_table import NGRAMS_NAME, NGramTable
from tests.command_line import refusal, run, run_json
from tests.rows import write_rows
from tests.tiny import tiny_drafter_folder, tiny_target_folder


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


def test_of_too_many_answers_some_of_all_files_are_counted(tmp_path: Path, monkeypatch) -> None:
    """The last file too, whose answers may be of another kind than those of the first."""
    files = []
    for kind, token in (("chat", 7), ("code", 9)):
        rows = [
            {"id": f"{kind}{n}", "set": kind, "prompt_ids": [1, n], "response_ids": [token] * 3}
            for n in range(10)
        ]
        files.append(write_rows(tmp_path / f"{kind}.jsonl", rows))
    folder = tiny_drafter_folder(tmp_path)
    for most, num_counted in ((60, 20), (12, 4)):
        monkeypatch.setattr(ngrams, "MAX_COUNTED", most)
        result = run("count-ngrams", folder, *files, "--json")
        assert result.exit_code == 0
        assert json.loads(result.stdout)["answers"] == num_counted
        said = f"in {num_counted} of 20 answers, drawn at random"
        assert (said in result.stderr) == (num_counted < 20)
        table = NGramTable.load(folder)
        assert max(table.after([7]), key=table.after([7]).get) == 7
        assert max(table.after([9]), key=table.after([9]).get) == 9


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


def test_the_target_itself_is_no_drafter(tmp_path: Path) -> None:
    """A table there would make another target of it, to which its own answers do not belong."""
    target, answers = tiny_target_folder(tmp_path), answers_of(tmp_path).parent
    written = {"folder": target.name, "sha256": target_sha256(target)}
    write_manifest(answers, {"target": written, "template": {"sha256": ""}, "runs": []})
    line = refusal("count-ngrams", target, answers)
    assert f"{target} is the target that wrote the answers in {answers}, not a drafter" in line
    assert target_sha256(target) == written["sha256"]
