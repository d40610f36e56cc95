"""What of the machine is this process's to use. Loads no model library."""

import ctypes
import math
import os
import platform
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep

_CGROUP = Path("/sys/fs/cgroup")
_PROC = Path("/proc")
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


def free_memory_bytes(cgroup: Path = _CGROUP, proc: Path = _PROC) -> int | None:
    """What can still be taken without swapping, or what the container leaves of it.

    None where the system does not say.
    """
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        (kib,) = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError):
        return None
    left = _first(
        lambda: _left(cgroup, "memory.max", "memory.current", "inactive_file"),
        lambda: _left(
            cgroup / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    )
    return kib * 1024 if left is None else min(kib * 1024, int(left))


class OtherWork:
    """How many of this process's cores others have kept busy since it was made."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._before, self._own_before = _core_times(proc), process_time()
        self._started = perf_counter()

    def busy_cores(self) -> float | None:
        """On average; None where the system does not say."""
        before, after = self._before, _core_times(self._proc)
        own, passed_seconds = process_time() - self._own_before, perf_counter() - self._started
        if not before or before.keys() != after.keys():
            return None
        shares = []
        for core, (idle, total) in after.items():
            passed = total - before[core][1]
            shares.append(1 - (idle - before[core][0]) / passed if passed else 0.0)
        return max(0.0, sum(shares) - own / passed_seconds)


def busy_cores(proc: Path = _PROC) -> float | None:
    """How many of this process's cores others keep busy: it looks for half a second.

    None where the system does not say.
    """
    work = OtherWork(proc)
    sleep(0.5)
    return work.busy_cores()


def _core_times(proc: Path) -> dict[int, tuple[int, int]]:
    """(idle, total) ticks of each core that this process may use; empty where unknown."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    own, times = os.sched_getaffinity(0), {}
    try:
        for line in (proc / "stat").read_text(encoding="ascii").splitlines():
            name, *ticks = line.split()
            number = name.removeprefix("cpu")
            if name.startswith("cpu") and number.isdigit() and int(number) in own:
                # The last two, of guests, are counted among the others already.
                spent = [int(tick) for tick in ticks[:8]]
                times[int(number)] = (spent[3] + spent[4], sum(spent))
    except (OSError, ValueError, IndexError):
        return {}
    return times


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> float | None:
    """Bytes of a container's limit that are not in use, or that its file cache can give up."""
    most = _number((folder / limit).read_text(encoding="ascii"))
    if most is None or most > _UNLIMITED_BYTES:
        return None
    stat = dict(
        line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    )
    taken = float((folder / used).read_text(encoding="ascii"))
    return max(0.0, most - taken + float(stat[reclaimable]))


def cpu_features() -> str:
    """What this CPU is and which instructions it has; as much as the system says."""
    # x86 and Arm name them differently.
    known = ("vendor_id", "model name", "flags", "CPU part", "Features")
    found = cpu_facts()
    facts = (f"{name}: {found[name]}" for name in known if name in found)
    return "\n".join([platform.machine(), *facts])


def cpu_vendor() -> str:
    """Who made it, whatever a virtual machine calls the model; empty if unknown."""
    return cpu_facts().get("vendor_id", "")


def cpu_name() -> str:
    """The model of this CPU, as much as the system says.

    Virtual machines call several generations by one name, such as AMD EPYC, which x86's numbers of
    family and model tell apart.
    """
    facts = cpu_facts()
    name = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in facts or "model" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts['model']})"


def cpu_facts() -> dict[str, str]:
    """What Linux knows of the first core, by its names for it; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


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
        except (OSError, ValueError, KeyError):
            continue
    return None


def give_back_memory() -> None:
    """Let the C library return to the system what was freed; it keeps it otherwise, in parts."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's own
    if trim is not None:
        trim(0)
