"""One line that changes on a terminal, lines now and then in a file."""

import io
import logging

import pytest

from blockdraft.core import progress
from blockdraft.core.progress import Progress, time_left

LOGGER = logging.getLogger("blockdraft.test")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    return now


def test_a_terminal_gets_one_line_that_changes(clock, caplog):
    caplog.set_level(logging.INFO, "blockdraft")
    terminal = Terminal()
    shown = Progress(LOGGER, terminal)
    shown.show("one")
    shown.show("too soon")
    clock[0] = 1.0
    shown.show("two")
    shown.clear()
    shown.clear()
    assert terminal.getvalue() == "\r\033[Kone\r\033[Ktwo\r\033[K"
    assert not caplog.text


def test_a_file_gets_a_line_now_and_then(clock, caplog):
    caplog.set_level(logging.INFO, "blockdraft")
    file = io.StringIO()
    shown = Progress(LOGGER, file)
    for second in range(100):
        clock[0] = float(second)
        shown.show(f"step {second}")
    assert [record.message for record in caplog.records] == ["step 30", "step 60", "step 90"]
    assert not file.getvalue()


def test_a_quiet_log_shows_nothing(clock):
    LOGGER.setLevel(logging.ERROR)
    terminal = Terminal()
    Progress(LOGGER, terminal).show("one")
    LOGGER.setLevel(logging.NOTSET)
    assert not terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.4, "4 s left"), (100, "2 min left"), (9000, "2 h 30 min left"), (float("inf"), "unknown")],
)
def test_time_left_in_words(seconds, words):
    assert words in time_left(seconds)
