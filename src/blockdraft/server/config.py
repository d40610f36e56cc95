"""The options of a server. Every default stands here, once."""

import ipaddress
import math
import re
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.core.errors import ConfigError

LogFormat = Literal["text", "json"]

_NO_NAME = re.compile(r"[\s/@*\[\]]|^[^:]*:[0-9]*$")
"""Finds what no bare host name or address holds, a port among it."""
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
"""Matches what a browser can send: "null" comes from files, and schemes from apps of their own."""
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")
_MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")
"""Addresses of IPv4 as a socket of IPv6 tells of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Where to listen, and what traffic to bear.

    host, port: 127.0.0.1 unless the server is meant for others; port 0 takes a free one.
    model_name: what requests call the model; None is the target's own name.
    api_keys: any of them opens the server; none means that everybody may use it.
    max_waiting: samples that may wait for a place; more are refused with 429.
    request_seconds: the longest that a request may take, waiting included.
    drain_seconds: after SIGTERM running requests may take so long to end.
    max_body: bytes of the largest request body.
    cors_origins: web pages from these origins may ask, such as https://example.org, and with "*"
    all; none by default.
    strict: refuse fields of a request that are unknown, instead of ignoring them.
    allowed_hosts: names by which the server may be asked, beside those of this machine alone; they
        are checked if it listens to this machine only, or any is given.
    trusted_proxies: addresses or networks whose X-Forwarded-For and -Proto are believed.
    prepare_seconds: the longest that tokenizing a prompt or compiling a grammar may take.
    root_path: prefix of the path under which a proxy shows the server, such as /models.
    log_format: "text" for people, "json" for one object a line.
    log_prompts: write prompts and answers to the log.

    Raises:
        ConfigError: a value is out of its range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_waiting: int = 256
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    max_body: int = 4 * 2**20
    cors_origins: tuple[str, ...] = ()
    strict: bool = False
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    prepare_seconds: float = 10.0
    root_path: str = ""
    log_format: LogFormat = "text"
    log_prompts: bool = False

    def __post_init__(self) -> None:
        _check_model_name(self.model_name)
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; give a number from 0 to 65535")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}; give 0 or more")
        if self.max_body < 1:
            raise ConfigError(f"max_body is {self.max_body}; give a number of bytes above 0")
        if not 0 < self.request_seconds < math.inf:
            raise ConfigError(f"request_seconds is {self.request_seconds}; give a time above 0")
        if not 0 < self.prepare_seconds < math.inf:
            raise ConfigError(f"prepare_seconds is {self.prepare_seconds}; give a time above 0")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; give a time of 0 or more")
        object.__setattr__(self, "cors_origins", tuple(map(_as_sent, self.cors_origins)))
        for name in self.allowed_hosts:
            if not name or _NO_NAME.search(name):
                raise ConfigError(
                    f"the allowed host is {name!r}; give a name such as models.example.org, "
                    "without scheme and port"
                )
        _check_root_path(self.root_path)
        for proxy in self.trusted_proxies:
            _check_proxy(proxy)
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise ConfigError("an API key is empty or has unusual characters; use plain ASCII")


def _check_model_name(name: str | None) -> None:
    if name is not None and not name.strip():
        raise ConfigError("model_name is empty; give a name, or leave it out")


def _as_sent(origin: str) -> str:
    """An origin as browsers write it."""
    found = origin.lower().rstrip("/")
    if not _ORIGIN.fullmatch(found):
        raise ConfigError(
            f"cors_origins is {origin!r}; give an origin such as https://example.org, or *"
        )
    return found


def _check_root_path(path: str) -> None:
    if path and not _ROOT_PATH.fullmatch(path):
        raise ConfigError(
            f"the root path is {path!r}; give a path such as /models, with a leading and no "
            "trailing slash"
        )


def _check_proxy(proxy: str) -> None:
    try:
        network = ipaddress.ip_network(proxy)
    except ValueError as error:
        raise ConfigError(
            f"the trusted proxy is {proxy!r}; give an address or a network, such as 10.0.0.0/8"
        ) from error
    # Clients are never known by this form, see Connection: it would trust nobody.
    if isinstance(network, ipaddress.IPv6Network) and network.subnet_of(_MAPPED):
        plain, length = network.network_address.ipv4_mapped, network.prefixlen - 96
        raise ConfigError(
            f"the trusted proxy is {proxy!r}, addresses of IPv4 written as IPv6; give "
            f"{plain}/{length}"
        )
