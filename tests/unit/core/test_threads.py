"""Threads beside other programs: how many, and how long they wait awake."""

import logging
import os
import subprocess
import sys

import pytest

from blockdraft.core import threads
from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError
from blockdraft.core.machine import num_cpus
from blockdraft.core.threads import ENVIRONMENT, SPIN_COUNT, TRAINING, bound_spin, num_threads

OWN = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def run(script: str, **variables: str) -> str:
    """What a fresh process prints, with no variables of threads but these."""
    environment = {name: value for name, value in os.environ.items() if name not in OWN}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


LOOK = "import blockdraft, os; print(os.environ.get('GOMP_SPINCOUNT'))"


def test_importing_the_package_bounds_the_wait_of_threads():
    assert run(LOOK) == SPIN_COUNT


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_what_the_user_has_set_stays(variables, expected):
    assert run(LOOK, **variables) == expected


def test_nothing_is_set_where_it_would_come_too_late(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", sys)
    for name in OWN:
        monkeypatch.delenv(name, raising=False)
    bound_spin()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another runtime")
def test_the_runtime_of_torch_reads_it():
    # The runtime shows its settings on stderr when it is loaded.
    script = (
        "import os, sys; os.dup2(1, 2); import blockdraft, torch; torch.ones(4) @ torch.ones(4)"
    )
    shown = run(script, OMP_DISPLAY_ENV="verbose")
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("torch runs on another runtime than GNU's")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in shown


@pytest.fixture
def machine(monkeypatch, caplog):
    """Sixteen cores, of which others keep as many busy as is set."""

    def keep_busy(busy):
        monkeypatch.setattr(threads, "busy_cores", lambda: busy)
        threads._busy_cores.cache_clear()

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "num_cpus", lambda: 16)
    caplog.set_level(logging.WARNING, "blockdraft")
    yield keep_busy
    threads._busy_cores.cache_clear()


@pytest.mark.parametrize(
    ("busy", "expected"), [(0.0, 16), (0.4, 16), (1.1, 15), (6.0, 10), (16.0, 8), (None, 16)]
)
def test_fewer_threads_where_others_compute(machine, caplog, busy, expected):
    machine(busy)
    assert num_threads(None, 16) == expected
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (expected < 16)
    if said:
        assert said[0] == (
            f"16 cores, {busy:.1f} busy with other programs: using {expected} threads until this "
            "process ends; to use all, give --threads 16 (num_threads=16 in Python) or set "
            "OMP_NUM_THREADS=16"
        )


def test_one_of_two_threads_is_said_in_the_singular(machine, monkeypatch, caplog):
    monkeypatch.setattr(threads, "num_cpus", lambda: 2)
    machine(1.0)
    assert num_threads(None, 2) == 1
    (record,) = caplog.records
    assert record.getMessage() == (
        "2 cores, 1.0 busy with other programs: using 1 thread until this process ends; "
        "to use both, give --threads 2 (num_threads=2 in Python) or set OMP_NUM_THREADS=2"
    )


@pytest.mark.parametrize(
    ("how", "remedy"),
    [
        (TRAINING, "to use all, give threads=16 or set OMP_NUM_THREADS=16"),
        (ENVIRONMENT, "until this process ends; to use all, set OMP_NUM_THREADS=16"),
    ],
)
def test_the_remedy_is_one_that_the_command_has(machine, caplog, how, remedy):
    """`blockdraft train` has a setting threads, `blockdraft data` has no option."""
    machine(8.0)
    num_threads(None, 16, how)
    assert caplog.records[0].getMessage().endswith(remedy)


def test_no_more_threads_than_cores_or_than_torch_has(machine):
    machine(0.0)
    assert (num_threads(None, 32), num_threads(None, 4)) == (16, 4)
    machine(12.0)
    assert num_threads(None, 4) == 4


def test_threads_that_were_asked_for_are_taken(machine, monkeypatch, caplog):
    machine(16.0)
    assert num_threads(24, 16) == 24
    monkeypatch.setenv("OMP_NUM_THREADS", "12")
    assert num_threads(None, 12) == 12
    assert not caplog.records


@pytest.mark.parametrize(
    ("cores", "said"),
    [(1, "1 core is available; give 1$"), (2, "2 cores are available; give 1 to 2$")],
)
def test_more_threads_than_cores_are_refused(monkeypatch, cores, said):
    monkeypatch.setattr(threads, "num_cpus", lambda: cores)
    assert LLMConfig(num_threads=cores).num_threads == cores
    with pytest.raises(ConfigError, match=f"^num_threads is 999, and {said}"):
        LLMConfig(num_threads=999)


def test_the_number_does_not_change_under_a_loaded_model(machine):
    machine(16.0)
    assert num_threads(None, 16) == 8
    threads.busy_cores = lambda: 0.0  # undone with the fixture's own change
    assert num_threads(None, 16) == 8


WAIT = """
from time import process_time, sleep
import blockdraft, torch
torch.set_num_threads(2)
x = torch.randn(512, 512)
x @ x
torch.nn.functional.silu(x)
begun = process_time()
for _ in range(100):
    torch.nn.functional.silu(x)
    sleep(0.006)
print((process_time() - begun) / 100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings another runtime")
@pytest.mark.skipif(num_cpus() < 2, reason="one core has nobody to wait for")
def test_a_waiting_thread_soon_gives_its_core_back():
    # Its own default waits through all of the pause. Time of the CPU, whoever else computes.
    assert float(run(WAIT)) < 0.003
