import os

import pytest

from blockdraft.core.machine import memory_bytes, num_cpus

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
