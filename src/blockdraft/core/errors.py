"""Everything that blockdraft raises on purpose.

BlockdraftError
├── ConfigError        bad option or unknown key                              exit 2
├── ModelError         missing tensor, unsupported architecture, wrong pair   exit 2
├── NetworkError       a download failed                                      exit 3
├── DiskError          the disk is full, or cannot be written                 exit 4
├── RequestError       bad or unsupported parameter of one request            400
│   └── ContextTooLong the prompt does not fit; says both numbers             400
├── Overloaded         too many requests wait                                 429
├── RequestTimeout     the request did not end in the time it is given        408
├── AnswerFailed       an answer that a command needs ended with an error     exit 5
└── EngineDead         the loop has ended; says why                           503
    └── EngineStopped  as the server shuts down                               503

A message names the value, the limit and the remedy, on one line.
"""

import signal
import socket

from blockdraft.core.signals import Signaled

# Exit statuses of every command.
NO = 1
"""The answer is no: outputs differ, a check failed."""
MISTAKE = 2
"""The command, the configuration or what it names is wrong."""
NETWORK_FAILED = 3
DISK_FAILED = 4
FAILED = 5
"""Anything else that is not the user's doing."""
UNDECIDED = 6
"""Neither yes nor no: an answer differs, and so does the machine that gave it."""
INTERRUPTED = 128 + signal.SIGINT
"""After Ctrl-C, as shells give it."""
OUTPUT_CLOSED = 128 + 13
"""After the reader of our output has left (SIGPIPE), as shells give it."""


class BlockdraftError(Exception):
    """Base of every error that a user can cause or mend."""


class ConfigError(BlockdraftError):
    """An option has a bad value, or is unknown."""


class ModelError(BlockdraftError):
    """A model cannot be found, is broken, is not supported, or does not fit its pair."""


class NetworkError(BlockdraftError):
    """Something could not be fetched; the same command may succeed later."""


class DiskError(BlockdraftError):
    """Something could not be read or written because of the disk, such as a full one."""


class RequestError(BlockdraftError):
    """A request carries a bad or unsupported parameter; `param` names it where it is known."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Refusal(str):
    """Why an answer ended with an error: its request asks for what cannot be followed to the end.

    Any other text of an error tells of a fault that is not the request's.
    """


class ContextTooLong(RequestError):
    """A prompt leaves no room for a token in the target's context."""


class Overloaded(BlockdraftError):
    """Too many requests wait; try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTimeout(BlockdraftError):
    """A request did not end in the time that it is given."""


class AnswerFailed(BlockdraftError):
    """The engine gave up an answer that a command cannot do without."""


class EngineDead(BlockdraftError):
    """The loop that answers requests has ended, by a failure or because it was asked to."""


class EngineStopped(EngineDead):
    """It was asked to, as the server shuts down."""


def reason_of(error: BaseException) -> str:
    """What an error of a library says, on one line; its type if it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def why_unread(error: BaseException) -> str:
    """Why a file cannot be read or written, for a message that names the file already."""
    return getattr(error, "strerror", None) or reason_of(error)


def exit_status(error: BaseException) -> int:
    """The exit status of a command that ends with this exception."""
    if isinstance(error, Signaled):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return OUTPUT_CLOSED
    # The system's own errors of connections are OSErrors too.
    if isinstance(error, NetworkError | ConnectionError | TimeoutError | socket.gaierror):
        return NETWORK_FAILED
    if isinstance(error, DiskError | OSError):
        return DISK_FAILED
    if isinstance(error, Overloaded | RequestTimeout | EngineDead | AnswerFailed):
        return FAILED
    return MISTAKE if isinstance(error, BlockdraftError) else FAILED
