"""What the tools refuse."""

import runpy
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ("count_ngrams", ["DRAFTER", "ANSWERS"]),
        ("sample_answers", ["ANSWERS", "--output", "ANSWERS"]),
    ],
)
def test_what_is_refused_is_a_line_before_the_work_begins(
    tmp_path: Path, tool: str, told: list[str]
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text("kept")
    names = {"DRAFTER": str(tmp_path / "no-drafter"), "ANSWERS": str(answers)}
    path = ROOT / "tools" / f"{tool}.py"
    with (
        patch.object(sys, "argv", [path.name, *(names.get(word, word) for word in told)]),
        pytest.raises(SystemExit, match=rf"^{tool}.py: .*; "),
    ):
        runpy.run_path(str(path), run_name="__main__")
    assert answers.read_text() == "kept"
