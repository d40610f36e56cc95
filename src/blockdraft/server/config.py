"""The options of a server. Every default stands here, once."""

import math
from dataclasses import dataclass, field

from blockdraft.core.errors import ConfigError


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
    cors_origins: web pages from these origins may ask; none by default.
    strict: refuse fields of a request that are unknown, instead of ignoring them.
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
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port < 2**16:
            raise ConfigError(f"port is {self.port}; give a number from 0 to 65535")
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting is {self.max_waiting}; give 0 or more")
        if self.max_body < 1:
            raise ConfigError(f"max_body is {self.max_body}; give a number of bytes above 0")
        if not 0 < self.request_seconds < math.inf:
            raise ConfigError(f"request_seconds is {self.request_seconds}; give a time above 0")
        if not 0 <= self.drain_seconds < math.inf:
            raise ConfigError(f"drain_seconds is {self.drain_seconds}; give a time of 0 or more")
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip():
                raise ConfigError("an API key is empty or holds odd characters; use plain ASCII")
