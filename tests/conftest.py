"""Options of the test suite."""

import os
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft.core.machine import num_cpus
from tests.fuzz import settings as fuzz_settings
from tests.own_log import own_log
from tests.this_machine import described_machine

# Processes that test side by side share the cores: threads that wait for each other spin. Read when
# torch is loaded, here and by every program that a test starts. Not set in the process that starts
# the others, which would hand its own number down.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = num_cpus() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))

# A shell that starts the suite in the background lets it ignore Ctrl-C, and so the programs that
# tests start and end that way.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a test breaks on purpose must be tested for again by the next.
os.environ.setdefault("BLOCKDRAFT_REMEMBER", "off")


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Of every test, however it runs the command line."""
    with own_log():
        yield


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's operations only, as on a machine without a compiler."""
    monkeypatch.setattr("blockdraft.kernels.cpu.backend.library", lambda: None)


@pytest.fixture(params=["kernels", "torch"])
def either_way(request: pytest.FixtureRequest) -> str:
    """With kernels, where they can be compiled, and without."""
    if request.param == "torch":
        request.getfixturevalue("without_kernels")
    return str(request.param)


def pytest_configure() -> None:
    """The processes that test side by side get the seed of the one that starts them."""
    fuzz_settings.choose_seed()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most parameter sets of a test marked `one_in(n)` to the slow tier.

    Which ones run in the quick tier depends on their names alone, at least one of each test does.
    """
    families = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("one_in")) is not None:
            families[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (_, n), members in families.items():
        members.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in members[-(-len(members) // n) :]:
            item.add_marker(pytest.mark.slow)


def pytest_report_header() -> str:
    """The seed of the fuzz."""
    return fuzz_settings.described()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The machine, last of all: bits depend on it, and logs are cut in front."""
    if not hasattr(config, "workerinput"):
        sys.stdout.write(f"{described_machine()}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the fuzz looked at, where it ran."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    lines = [value for report in reports for name, value in report.user_properties
             if name == "fuzz" and report.when == "call"]  # fmt: skip
    if lines:
        terminalreporter.section("fuzz")
        for line in [fuzz_settings.described(), *lines]:
            terminalreporter.write_line(str(line))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--golden`."""
    parser.addoption(
        "--golden",
        type=Path,
        default=Path(__file__).parent / "parity" / "golden",
        help="folder of golden drafters to replay (default: the ones in the repository)",
    )
