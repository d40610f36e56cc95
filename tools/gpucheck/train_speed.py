"""How long a training step takes, with few blocks in a draft forward and with many."""

from dataclasses import replace
from statistics import median
from typing import Any

from blockdraft.core.errors import BlockdraftError
from blockdraft.train.check import check_run
from blockdraft.train.trainer import time_steps
from gpucheck.notes import Notes, first_line
from gpucheck.recipe import WAYS, train_config
from gpucheck.settings import Settings

NUM_STEPS = 8
NUM_WARM = 3
"""First steps compile and choose kernels."""


def run(settings: Settings, notes: Notes) -> None:
    """Note seconds for each way as soon as they are known."""
    config = train_config(settings, notes.work / "steps")
    texts = check_run(config).texts
    number = settings.train_steps or NUM_STEPS
    for name, changes in WAYS.items():
        if settings.device == "cpu" and changes.get("attention") == "flex":
            continue
        try:
            seconds = time_steps(replace(config, **changes), texts, number)
        # What the compiler of the attention raises is of any kind.
        except (BlockdraftError, RuntimeError, ImportError, TypeError) as error:
            notes.note("ways", name, value={"error": first_line(error)})
            continue
        notes.note("ways", name, value=_found(seconds, replace(config, **changes)))


def _found(seconds: list[float], config: Any) -> dict[str, Any]:
    warm = seconds[NUM_WARM:] or seconds[-1:]
    return {
        "first seconds": round(seconds[0], 3),
        "seconds": round(median(warm), 4),
        "blocks_per_second": round(config.batch_sequences * config.num_anchors / median(warm)),
    }
