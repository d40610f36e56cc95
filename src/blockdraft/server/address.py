"""The address of a server."""

import socket

from blockdraft.core.errors import ConfigError
from blockdraft.server.config import ServeConfig

_BACKLOG = 2048


def bind(config: ServeConfig) -> socket.socket:
    """Take the address, before anything slow is done; connections wait until the server runs.

    Raises:
        ConfigError: it cannot be taken.
    """
    try:
        family = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((config.host, config.port))
            # Only who listens keeps others away from the address.
            sock.listen(_BACKLOG)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}; give another --host or --port"
        ) from error
    return sock
