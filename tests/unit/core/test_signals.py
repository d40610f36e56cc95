"""A signal that comes while the log is written, and one that has to wait."""

import logging
import signal
import threading

import pytest

from blockdraft.core.signals import log_in_handler
from blockdraft.core.uninterrupted import uninterrupted
from tests.interrupting_log import interrupting_log
from tests.serving import wait_until

logger = logging.getLogger(__name__)


@pytest.fixture
def handle():
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def test_a_handler_can_log_while_the_log_is_written(handle):
    done = []

    def receive(*_):
        log_in_handler(logger, "came with %d", 7)
        done.append(True)

    handle(receive)
    with interrupting_log(logger, signal.SIGUSR1, "first") as log:
        logger.info("first")
        assert done
        wait_until(lambda: log.text == "first\ncame with 7\n")


def test_a_handler_that_logs_by_itself_fails(handle):
    handle(lambda *_: logger.info("came"))
    with (
        interrupting_log(logger, signal.SIGUSR1, "first"),
        pytest.raises(RuntimeError, match="reentrant call"),
    ):
        logger.info("first")


def test_an_interrupt_waits_for_what_must_not_end_in_the_middle():
    handler, done = signal.getsignal(signal.SIGINT), []

    def work():
        with uninterrupted():
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
                done.append("inner")
            done.append("outer")
        done.append("behind")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is handler


def test_in_other_threads_nothing_is_changed():
    found = []

    def work():
        with uninterrupted():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
