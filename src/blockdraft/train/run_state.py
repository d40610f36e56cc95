"""What a run leaves behind: a state to continue from, a log, and where its drafter comes from."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from blockdraft.core.errors import ConfigError
from blockdraft.train.config import TrainConfig

MAX_COUNTED_SECONDS = 120.0
"""A longer gap between two ticks is a stopped process or a sleeping machine."""


class RunClock:
    """Seconds that the run was at work; time in which the process was stopped does not count."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._last = time.monotonic()

    def tick(self) -> float:
        """Count the time since the last tick; returns the sum."""
        now = time.monotonic()
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
        ConfigError: it is the state of a run with other settings.
    """
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, weights_only=True)
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
        "command": sys.argv,
        "git_commit": _git_commit(),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("blockdraft", "torch", "transformers")},
        },
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "threads": torch.get_num_threads(),
            "device": config.device,
        },
        "config": config.to_dict(),
        **facts,
    }


def _git_commit() -> str | None:
    """Commit of the working tree this code lies in, "+" appended if it was changed."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed.strip() else "")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()
