"""How many threads compute, and how long one that waits for the others stays awake.

Beside another busy process a thread may wait for one that has lost its core. Loads no model
library. docs/experiments/threads.md has the measurements.
"""

import logging
import os
import sys
import threading
from functools import lru_cache

from blockdraft.core.errors import ConfigError
from blockdraft.core.machine import busy_cores, num_cpus
from blockdraft.core.words import counted

SPIN_COUNT = "1000"
"""Rounds of a waiting thread's loop, some 20 microseconds; then it sleeps. The runtime's own
300,000 take longer than a scheduler lets a thread run, so that the core is lost to waiting."""

logger = logging.getLogger(__name__)


_process_with_threads: int | None = None


def refuse_a_fork(num_threads: int) -> None:
    """Refuse to compute with several threads in a fork of a process that did so already.

    The fork has none of them, and the library that keeps them would wait for them without end.

    Raises:
        ConfigError: says how to start processes instead.
    """
    global _process_with_threads
    if num_threads == 1:
        return
    if _process_with_threads is None:
        _process_with_threads = os.getpid()
    if os.getpid() != _process_with_threads:
        raise ConfigError(
            "this process was forked from one that loaded an LLM with several threads, which a "
            "fork does not inherit; start processes with multiprocessing's 'spawn', or give "
            "num_threads=1"
        )


def bound_spin() -> None:
    """Let threads that wait for each other sleep soon; the user's own settings stay.

    GNU's OpenMP, which torch brings on Linux and our kernels share, reads its environment when it
    is loaded: to be called before torch is imported, and of no use afterwards.
    """
    # The count outranks the policy, so it would undo a policy that the user has set.
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


SERVING = "give --threads {0} (num_threads={0} in Python) or set OMP_NUM_THREADS={0}"
TRAINING = "give threads={0} or set OMP_NUM_THREADS={0}"
ENVIRONMENT = "set OMP_NUM_THREADS={0}"
"""How a user asks for threads: by the options that the command in question has."""


def num_threads(asked: int | None, of_torch: int, how: str = SERVING) -> int:
    """As many as asked for; else torch's, but no more than cores, and fewer where others compute.

    `how` a user asks for more: one of the sentences above.

    `OMP_NUM_THREADS` is asking too. At least half the cores are taken: the share that the scheduler
    grants beside one other program.
    """
    if asked is not None:
        return asked
    cores = num_cpus()
    most = min(of_torch, cores)
    if most == 1 or "OMP_NUM_THREADS" in os.environ:
        return most
    busy = others_at_start()
    free = max(round(cores - busy), (cores + 1) // 2)
    if free >= most:
        return most
    logger.warning(
        "%d cores, %.1f busy with other programs: using %s until this process ends; to use %s, %s",
        *(cores, busy, counted(free, "thread"), "both" if most == 2 else "all", how.format(most)),
    )
    return free


def check_threads(name: str, asked: int | None) -> None:
    """Refuse more than cores: they wait for each other, and very many take the machine down.

    Raises:
        ConfigError: there are fewer cores for this process; `name` is that of the setting.
    """
    if asked is not None and asked > (cores := num_cpus()):
        available = "1 core is" if cores == 1 else f"{cores} cores are"
        values = "1" if cores == 1 else f"1 to {cores}"
        raise ConfigError(f"{name} is {asked}, and {available} available; give {values}")


def watch_cores() -> None:
    """Look how busy the cores are while something else is done; `num_threads` then knows it."""
    threading.Thread(target=others_at_start, daemon=True).start()


_looking = threading.Lock()


def others_at_start() -> float:
    """Cores that others kept busy when this process first looked; the look takes half a second."""
    with _looking:
        return _busy_cores()


@lru_cache
def _busy_cores() -> float:
    """Looked at once a process: another number of threads may change the bits of a sum."""
    return busy_cores() or 0.0
