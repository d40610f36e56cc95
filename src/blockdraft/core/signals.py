"""What a signal's handler may say."""

import logging
import threading


def log_in_handler(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a message from the handler of a signal.

    In a thread of its own. The signal may have come while this one was writing to the log, which
    cannot be done again in between: Python raises a RuntimeError, and what the handler has to do
    would be lost with it.
    """
    threading.Thread(target=logger.info, args=(message, *args)).start()
