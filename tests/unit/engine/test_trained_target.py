"""A drafter of another target of the same sizes shows in acceptance only, so a line says it."""

import json
from pathlib import Path

import pytest

from blockdraft.engine.trained_target import trained_targets, warn_of_other_target


def drafter_folder(folder: Path, verifier: object) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"speculators_config": {"verifier": {"name_or_path": verifier}}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("drafter", "verifier", "expected"),
    [
        ("z-lab/Qwen3-4B-DFlash-b16", None, {"Qwen/Qwen3-4B"}),
        ("z-lab/Qwen3-4B-DFlash-b16@main", None, {"Qwen/Qwen3-4B"}),
        ("org/drafter", "Qwen/Qwen3-8B", {"Qwen/Qwen3-8B"}),
        ("org/drafter", "/home/me/models/Qwen3-8B", set()),
        ("org/drafter", None, set()),
        (None, 3, set()),
    ],
)
def test_the_targets_that_a_drafter_was_made_for(
    tmp_path: Path, drafter: str | None, verifier: object, expected: set[str]
) -> None:
    assert trained_targets(drafter, drafter_folder(tmp_path, verifier)) == expected


@pytest.mark.parametrize(
    ("target", "is_told"),
    [
        ("models--Qwen--Qwen3-8B/snapshots/abc", False),
        ("models--qwen--qwen3-8b/snapshots/abc", False),
        ("models--Qwen--Qwen3-8B-Base/snapshots/abc", True),
        ("a-folder-of-mine", False),
    ],
)
def test_a_line_names_both_if_they_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str, is_told: bool
) -> None:
    drafter = drafter_folder(tmp_path / "drafter", "Qwen/Qwen3-8B")
    warn_of_other_target(tmp_path / target, "org/drafter", drafter)
    line = "the drafter was made for Qwen/Qwen3-8B, and the target is Qwen/Qwen3-8B-Base"
    assert (line in caplog.text) == is_told
    assert bool(caplog.text) == is_told
