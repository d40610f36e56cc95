"""What a run leaves behind: a state to continue from, a log, and where its drafter comes from."""

import json
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from blockdraft.core.environment import describe_environment
from blockdraft.core.errors import ConfigError
from blockdraft.train.config import TrainConfig

MAX_COUNTED_SECONDS = 120.0
"""A longer gap between two ticks is a stopped process or a sleeping machine; so whatever may take
longer ticks on the way."""

_STATE_KEYS = {
    *("config", "optimizer", "generator", "step", "epoch", "next_batch", "num_sequences"),
    *("num_examples", "seconds"),
}


class RunClock:
    """Seconds that the run was at work; time in which the process was stopped does not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._last = monotonic()

    def tick(self) -> float:
        """Count the time since the last tick; returns the sum."""
        now = monotonic()
        self.seconds += min(now - self._last, MAX_COUNTED_SECONDS)
        self._last = now
        return self.seconds


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state whole or not at all."""
    part = path.with_name(path.name + ".part")
    torch.save(dict(state), part)
    part.replace(path)


def load_state(path: Path, config: TrainConfig) -> dict[str, Any] | None:
    """The state that an earlier run left, or None.

    Raises:
        ConfigError: it is damaged, or the state of a run with other settings.
    """
    if not path.exists():
        return None
    remedy = "delete it to begin anew, or give a new folder"
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        missing = _STATE_KEYS - state.keys()
    # torch raises any type for a damaged file, and advises to trust it.
    except Exception as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}); {remedy}") from error
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}; {remedy}")
    # How long to train may change between the parts of a run; what is trained may not.
    free = {"max_minutes", "max_steps", "eval_minutes", "save_minutes", "threads"}
    settings = config.to_dict()
    changed = [k for k, v in settings.items() if k not in free and state["config"].get(k) != v]
    if changed:
        raise ConfigError(
            f"{path} is of a run with another {', '.join(changed)}; give a new folder, or delete it"
        )
    return state


def append_log(path: Path, row: Mapping[str, Any]) -> None:
    """Add one JSON line."""
    with path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(dict(row)) + "\n")


def provenance(config: TrainConfig, **facts: Any) -> dict[str, Any]:
    """How a drafter was made: command, code, versions, machine, settings, and `facts`."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "device": config.device,
        "config": config.to_dict(),
        **facts,
    }
