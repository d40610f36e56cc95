"""The settings of a training from the committed answers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockdraft.train.config import TrainConfig
from blockdraft.train.config_file import resolve_run
from gpucheck.settings import ROOT, Settings

RECIPE = ROOT / "recipes" / "smollm2-135m" / "train.toml"
WAYS: Mapping[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "dense, 40 blocks a forward": {"attention": "dense", "anchors_per_forward": 40},
    "flex, packed rows": {
        "attention": "flex",
        "pack_len": 2048,
        "batch_sequences": 32,
        "num_anchors": 256,
        "anchors_per_forward": 256,
    },
}
"""What a device may be good at: few blocks at once, more of them, or many in tiles of one shape."""
TAU_PROMPTS = 2
"""Of each set, decoded before and after."""


def train_config(settings: Settings, out: Path) -> TrainConfig:
    """The recipe on a device, from the drafter that ships, on all answers."""
    arguments = [
        str(RECIPE),
        f"target={settings.target}",
        f"init_from={settings.drafter}",
        f"out={out}",
        f"device={settings.device}",
    ]
    if settings.drafter == "auto":
        arguments.remove("init_from=auto")
    config = resolve_run(arguments).train
    config = replace(
        config, data=tuple(map(Path, settings.answers)), feature_cache=None, tau_limit=TAU_PROMPTS
    )
    return replace(config, **_TINY) if settings.is_rehearsal else config


_TINY: dict[str, Any] = {
    "held_out_share": 0.2,
    "batch_sequences": 4,
    "num_anchors": 4,
    "anchors_per_forward": 4,
    "eval_sequences": 4,
    "tau_max_tokens": 8,
    "draft_vocabulary": 0,
    "num_frequent": 0,
    "attention": "dense",
    "dtype": "float32",
}
