"""The address of a server, and the names under which it may be asked. No torch."""

import ipaddress
import re
import socket
from typing import Any

from blockdraft.core.errors import ConfigError
from blockdraft.server.config import ServeConfig

BACKLOG = 2048
"""Connections that may wait to be taken."""
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@]+)(?::[0-9]*)?", re.IGNORECASE)


def bind(config: ServeConfig) -> socket.socket:
    """Take the address, before anything slow is done; connections wait until the server runs.

    Raises:
        ConfigError: it cannot be taken.
    """
    try:
        family, _ = _resolve(config)
        # Unless it is called TCP, asyncio leaves Nagle's algorithm on: a body would wait until its
        # head is acknowledged, for which clients take 40 ms, and an event of a stream for the last.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((config.host, config.port))
            # Only who listens keeps others away from the address.
            sock.listen(BACKLOG)
        except OSError:
            sock.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {reason}; give another --host or --port"
        ) from error
    return sock


def url_of(host: str, port: int) -> str:
    """Where a server on this host name or address is reached."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _resolve(config: ServeConfig) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    return found[0][0], found[0][4]


class Names:
    """Under which names the server may be asked, and by pages from where.

    A server that only this machine can reach is still reached by its browser, on behalf of any
    page: one of a foreign origin asks directly, and one whose name was pointed at this machine
    (DNS rebinding) could even read the answers. The browser tells of both, in Origin and Host.

    Nothing is checked where other machines can reach the server and nobody has said by what names.
    """

    def __init__(self, config: ServeConfig) -> None:
        self.are_checked = bool(config.allowed_hosts) or _binds_loopback(config)
        self._own = config.host.lower()
        self._allowed = {host.lower() for host in config.allowed_hosts}
        self._origins = frozenset(config.cors_origins)

    def allow_host(self, host: str) -> bool:
        """Whether a Host header names this server; the port does not matter, tunnels change it."""
        name = host_name(host)
        return name is not None and (
            name == self._own or name in self._allowed or is_loopback(name)
        )

    def allow_origin(self, origin: str, host: str) -> bool:
        """Whether a page of this origin may ask the server, which it calls `host`."""
        origin = origin.lower()
        place = origin.partition("://")[2]
        return (
            place == host.lower()
            or not self._origins.isdisjoint({"*", origin})
            or host_name(place) in self._allowed
        )


def host_name(host: str) -> str | None:
    """The name or address in a Host header, without its port; None if it is malformed."""
    found = _HOST.fullmatch(host)
    return None if found is None else found[1].strip("[]").rstrip(".").lower()


def is_loopback(name: str) -> bool:
    """Whether only this machine has this name or address; nothing is looked up."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _binds_loopback(config: ServeConfig) -> bool:
    try:
        return is_loopback(_resolve(config)[1][0])
    except (OSError, UnicodeError):
        return is_loopback(config.host)  # bind says what is wrong with it
