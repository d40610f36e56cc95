"""What of the machine is this process's to use. Loads no model library."""

import math
import os
import platform
from collections.abc import Callable
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES = 2**60
"""Version 1 says "no limit" with a number close to the largest."""


def num_cpus(cgroup: Path = _CGROUP) -> int:
    """Cores that the scheduler gives this process: its affinity, and its container's quota."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota = _first(
        lambda: _quota((cgroup / "cpu.max").read_text(encoding="ascii")),
        lambda: _quota(
            " ".join((cgroup / "cpu" / name).read_text(encoding="ascii") for name in _V1_QUOTA)
        ),
    )
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def memory_bytes(cgroup: Path = _CGROUP) -> int:
    """The memory of the machine, or of the container if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _first(
        lambda: _number((cgroup / "memory.max").read_text(encoding="ascii")),
        lambda: _number((cgroup / "memory" / "memory.limit_in_bytes").read_text(encoding="ascii")),
    )
    return physical if limit is None or limit > _UNLIMITED_BYTES else min(physical, int(limit))


def cpu_features() -> str:
    """What this CPU is and which instructions it has; as much as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # x86 and Arm name them differently; the first core stands for all.
    known = ("model name", "flags", "CPU part", "Features")
    found = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(found[name] for name in known if name in found)])


_V1_QUOTA = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def _quota(text: str) -> float | None:
    """Cores, from time allowed and period; None without a limit ("max", or -1 in version 1)."""
    quota, period = text.split()
    allowed = _number(quota)
    return None if allowed is None or allowed <= 0 else allowed / float(period)


def _number(text: str) -> float | None:
    return None if text.strip() == "max" else float(text)


def _first(*readings: Callable[[], float | None]) -> float | None:
    """The first limit that can be read: version 2 of control groups, then version 1."""
    for read in readings:
        try:
            return read()
        except (OSError, ValueError):
            continue
    return None
