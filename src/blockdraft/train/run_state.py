"""What a run leaves behind: a state to continue from, and where its drafter comes from."""

import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from blockdraft.core.errors import ConfigError, DiskError, why_unread
from blockdraft.core.files import replace_file
from blockdraft.core.out_of_memory import is_out_of_memory
from blockdraft.core.settings import plain
from blockdraft.measure.provenance import describe_environment
from blockdraft.train.config import TrainConfig

STATE = "state.pt"
"""In the folder of a run."""

REMEDY = "delete it to start over, or give a new folder"
"""For a state that is of no use."""

MAX_COUNTED_SECONDS = 120.0
"""A longer gap between two ticks is a stopped process or a sleeping machine; so whatever may take
longer ticks on the way."""

_STATE_KEYS = {
    *("config", "optimizer", "generator", "step", "epoch", "next_batch", "num_sequences"),
    *("num_tokens", "texts", "seconds", "evaluated"),
}

_FREE = {
    *("max_minutes", "max_steps", "threads", "tensorboard"),
    *("eval_minutes", "eval_steps", "save_minutes", "save_steps"),
    *("eval_sequences", "tau_prompts", "tau_limit", "tau_max_tokens"),
    *("shard_target", "shard_drafter", "device_map"),
    *("target", "data", "out", "feature_cache"),
}
"""How long to train, on how many texts, and what to look at may change between the parts of a run,
and folders may move; what is trained may not: see `_TRAINED`."""

_TRAINED = {
    "target_sha256": "a target of other weights",
    "drafter": "a drafter of another shape, or with another mask token",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """What is done again when minutes or steps have passed; times are (seconds, step)."""

    minutes: float
    steps: int | None

    def is_due(self, last: tuple[float, int], now: tuple[float, int]) -> bool:
        """True if it is time again."""
        by_steps = self.steps is not None and now[1] - last[1] >= self.steps
        return by_steps or now[0] - last[0] > 60 * self.minutes


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
    """Write a state whole or not at all.

    Raises:
        DiskError: there is no room, or no right to write.
    """
    try:
        replace_file(path, lambda part: torch.save(dict(state), part))
    # torch's own writer says RuntimeError when the disk is full.
    except (OSError, RuntimeError) as error:
        reason, free = str(error).split("\n")[0], shutil.disk_usage(path.parent).free
        then = "resumes from the previous state" if path.exists() else "starts over"
        raise DiskError(
            f"cannot write {path}: {reason}; its disk has {free / 2**20:.0f} MiB free; make space "
            f"and start again, which {then}"
        ) from error


def saved_step(path: Path) -> int | None:
    """The step of the state that a run left, None if there is none that can be read."""
    try:
        # Mapped: nothing is read but the step.
        return int(torch.load(path, weights_only=True, map_location="cpu", mmap=True)["step"])
    # torch raises any type for a damaged file, which the next start refuses with its reason.
    except Exception:
        return None


@contextmanager
def damage_refused(path: Path, remedy: str = REMEDY) -> Iterator[None]:
    """Name the file where a state that is read or taken up is not as it was saved.

    Raises:
        ConfigError: in place of the error that its contents led to.
        DiskError: it cannot be read; whole perhaps, so nobody is told to delete it.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot read {path}: {why_unread(error)}; fix its disk or permissions and start "
            "again, which resumes from there"
        ) from error
    # torch raises any type for a damaged file, and advises to trust it.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(f"{path} is damaged ({type(error).__name__}); {remedy}") from error


def read_state(path: Path, keys: Set[str], remedy: str) -> dict[str, Any] | None:
    """What `save_state` has written; None if there is nothing.

    Args:
        path: of the state.
        keys: that it must have.
        remedy: what to do about a state that is of no use.

    Raises:
        ConfigError: it is damaged, or lacks some of the keys.
        DiskError: it cannot be read.
    """
    if not path.exists():
        return None
    with damage_refused(path, remedy):
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        missing = keys - state.keys()
    if missing:
        raise ConfigError(f"{path} lacks {', '.join(sorted(missing))}; {remedy}")
    return state


def load_state(
    path: Path, config: TrainConfig, trained: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The state that an earlier run left, or None.

    Args:
        path: of the state.
        config: of the run that is to go on.
        trained: what it trains, under the names of `_TRAINED`.

    Raises:
        ConfigError: it is damaged, or the state of a run with other settings.
        DiskError: it cannot be read.
    """
    state = read_state(path, _STATE_KEYS | _TRAINED.keys(), REMEDY)
    if state is None:
        return None
    defaults = {field.name: plain(field.default) for field in fields(config)}
    with damage_refused(path):
        before = defaults | state["config"]
    changed = [
        f"{k} (now {v}, before {before[k]})"
        for k, v in config.to_dict().items()
        if k not in _FREE and before[k] != v
    ]
    if changed:
        raise ConfigError(
            f"{path} is of a run with another {', '.join(changed)}; give the same, or a new out, "
            "or delete it to start over"
        )
    for name, what in _TRAINED.items():
        if state[name] != plain(trained[name]):
            raise ConfigError(f"{path} is of a run with {what}; give a new folder, or delete it")
    return state


def provenance(config: TrainConfig, **facts: Any) -> dict[str, Any]:
    """How a drafter was made: command, code, versions, machine, settings, and `facts`."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "device": config.device,
        "config": config.to_dict(),
        **facts,
    }
