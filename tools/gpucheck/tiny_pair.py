"""A random pair, and answers to train on: what a rehearsal runs with."""

import json
import random
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

CONTEXT = 4096
NUM_ANSWERS = 60


def write_tiny_pair(folder: Path) -> dict[str, Any]:
    """Write target, drafter and answers, once; returns the settings that name them."""
    # The tests have such a pair already; a rehearsal runs in the checkout, as they do.
    tiny: Any = import_module("tests.tiny")
    found = {
        "target": str(folder / "llama-target"),
        "drafter": str(folder / "drafter"),
        "answers": (str(folder / "answers.jsonl"),),
    }
    if not (folder / "answers.jsonl").exists():  # the last that is written
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tiny.tiny_target_folder(folder, max_position_embeddings=CONTEXT)
        tiny.tiny_drafter_folder(folder, max_position_embeddings=CONTEXT)
        _write_answers(folder / "answers.jsonl")
    return found


def _write_answers(path: Path) -> None:
    draw = random.Random(0)
    rows = [
        {
            "id": f"tiny-{number}",
            "set": "tiny",
            "prompt_ids": [draw.randrange(256) for _ in range(12)],
            "response_ids": [draw.randrange(256) for _ in range(24)],
        }
        for number in range(NUM_ANSWERS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
