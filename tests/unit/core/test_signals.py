"""A signal that comes while the log is written."""

import logging
import signal

import pytest

from blockdraft.core.signals import log_in_handler
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
