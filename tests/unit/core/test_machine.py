import os

import pytest

from blockdraft.core import machine as module
from blockdraft.core.machine import (
    busy_cores,
    cpu_name,
    free_memory_bytes,
    memory_bytes,
    num_cpus,
)

GIB = 2**30


@pytest.fixture
def machine(monkeypatch):
    """Eight cores and 16 GiB, without a container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("50000 100000", 1),
     ("6400000 100000", 8), ("damaged", 8), ("", 8)],
)  # fmt: skip
def test_cores_are_those_of_the_container(tmp_path, text, expected):
    (tmp_path / "cpu.max").write_text(text, encoding="ascii")
    assert num_cpus(tmp_path) == expected


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("400000", 4)])
def test_cores_of_an_older_container(tmp_path, quota, expected):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n", encoding="ascii")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert num_cpus(tmp_path) == expected


@pytest.mark.usefixtures("machine")
def test_without_a_container_all_is_ours(tmp_path):
    assert num_cpus(tmp_path) == 8
    assert memory_bytes(tmp_path) == 16 * GIB


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("text", "expected"), [("max\n", 16 * GIB), (f"{GIB}\n", GIB), (f"{64 * GIB}\n", 16 * GIB)]
)
def test_memory_is_that_of_the_container(tmp_path, text, expected):
    (tmp_path / "memory.max").write_text(text, encoding="ascii")
    assert memory_bytes(tmp_path) == expected


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("text", "expected"), [("9223372036854771712", 16 * GIB), (f"{2 * GIB}", 2 * GIB)]
)
def test_memory_of_an_older_container(tmp_path, text, expected):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(text, encoding="ascii")
    assert memory_bytes(tmp_path) == expected


def write_meminfo(folder, gib):
    folder.mkdir(exist_ok=True)
    text = f"MemTotal: 99 kB\nMemAvailable:   {gib * 2**20} kB\n"
    (folder / "meminfo").write_text(text, encoding="ascii")
    return folder


def test_free_memory_is_that_of_the_machine_or_what_a_container_leaves(tmp_path):
    proc = write_meminfo(tmp_path / "proc", 6)
    assert free_memory_bytes(tmp_path, proc) == 6 * GIB
    for name, value in (("max", "max"), ("current", 3 * GIB)):
        (tmp_path / f"memory.{name}").write_text(f"{value}\n", encoding="ascii")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {GIB}\n", encoding="ascii")
    assert free_memory_bytes(tmp_path, proc) == 6 * GIB
    (tmp_path / "memory.max").write_text(f"{4 * GIB}\n", encoding="ascii")
    assert free_memory_bytes(tmp_path, proc) == 2 * GIB
    assert free_memory_bytes(tmp_path, tmp_path / "none") is None


def test_free_memory_of_an_older_container(tmp_path):
    proc = write_meminfo(tmp_path / "proc", 6)
    (tmp_path / "memory").mkdir()
    for name, value in (("limit", 4 * GIB), ("usage", 3 * GIB)):
        (tmp_path / "memory" / f"memory.{name}_in_bytes").write_text(f"{value}", encoding="ascii")
    stat = tmp_path / "memory" / "memory.stat"
    stat.write_text(f"total_inactive_file {GIB}\n", encoding="ascii")
    assert free_memory_bytes(tmp_path, proc) == 2 * GIB


def test_busy_cores_are_those_that_this_process_may_use(tmp_path, monkeypatch):
    own = iter([3.0, 3.0, 3.0, 3.25, 0.0, 0.0])
    monkeypatch.setattr("blockdraft.core.machine.process_time", lambda: next(own))
    clock = iter([0.0, 0.5, 0.0, 1.0, 0.0, 1.0])
    monkeypatch.setattr("blockdraft.core.machine.perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)
    path = tmp_path / "stat"

    def write(*cores):
        # user nice system idle iowait irq softirq steal guest guest_nice
        lines = [f"cpu{n} {u} 0 0 {i} 0 0 0 0 {u} 0" for n, (u, i) in enumerate(cores)]
        path.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, "intr 5"]), "ascii")

    def pass_time(seconds):
        # Half of the time of the first, all of the second, which is not ours, none of the third.
        write((150, 150), (300, 100), (100, 200))

    write((100, 100), (100, 100), (100, 100))
    monkeypatch.setattr(module, "sleep", pass_time)
    assert busy_cores(proc=tmp_path) == pytest.approx(0.5)
    write((100, 100), (100, 100), (100, 100))
    assert busy_cores(proc=tmp_path) == pytest.approx(0.25)  # what we did ourselves is ours
    assert busy_cores(proc=tmp_path / "none") is None


def test_generations_of_one_name_are_told_apart(monkeypatch):
    facts = {"model name": "AMD EPYC", "cpu family": "25", "model": "17"}
    monkeypatch.setattr(module, "cpu_facts", lambda: facts)
    assert cpu_name() == "AMD EPYC (family 25, model 17)"
    zen4, facts["model"] = cpu_name(), "1"
    assert cpu_name() != zen4


def test_a_cpu_without_numbers_has_its_name_alone(monkeypatch):
    monkeypatch.setattr(module, "cpu_facts", lambda: {"model name": "Neoverse-V2"})
    assert cpu_name() == "Neoverse-V2"
