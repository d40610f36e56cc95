"""What the tests of training runs share: random answers, small settings, the log."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdraft.train import training_run
from blockdraft.train.config import TrainConfig
from tests.rows import write_rows
from tests.tiny import tiny_target_folder

Logged = list[dict[str, Any]]


def write_answers(path: Path, num: int, length: int = 30, seed: int = 0) -> Path:
    """Random texts; prompts of different lengths and answers to them."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(num):
        ids = torch.randint(1, 250, (6 + number % 5 + length,), generator=generator).tolist()
        prompt_ids, response_ids = ids[: -length or None], ids[-length:]
        rows.append(
            {"id": f"p{number}", "set": f"set{number % 2}", "finish": "stop"}
            | {"prompt_ids": prompt_ids, "response_ids": response_ids}
        )
    return write_rows(path, rows)


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """Ten steps on a tiny target, without real decoding."""
    settings: dict[str, Any] = {
        "target": folder / "llama-target",
        "data": (folder / "answers.jsonl",),
        "out": folder / "run",
        "num_layers": 2,
        "num_features": 3,
        "block_size": 4,
        "held_out_share": 0.2,
        "batch_sequences": 4,
        "num_anchors": 6,
        "anchors_per_forward": 4,
        "num_frequent": 100,
        "num_random": 20,
        "max_minutes": None,
        "max_steps": 10,
        "warmup_steps": 2,
        "tau_limit": 0,
        "dtype": "float32",
    }
    if not (folder / "llama-target").exists():
        tiny_target_folder(folder)
    if not (folder / "answers.jsonl").exists():
        write_answers(folder / "answers.jsonl", 24)
    return TrainConfig(**settings | changes)


def settings_of(config: TrainConfig) -> list[str]:
    """As a command line has them."""
    values = config.to_dict().items()
    return [f"{name}={'none' if v is None else json.dumps(v)}" for name, v in values]


@contextmanager
def broken_off(at: int) -> Iterator[None]:
    """A run inside ends at that step, and nothing is saved on the way out, as if it was killed."""
    step = training_run.TrainingRun.next_step

    def break_off(run: Any) -> None:
        if run.step == at:
            raise KeyboardInterrupt
        step(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run.TrainingRun, "next_step", break_off)
        with pytest.raises(KeyboardInterrupt):
            yield


def logged(folder: Path) -> Logged:
    """The rows of the log that are steps."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [row for row in rows if "nll" in row]
