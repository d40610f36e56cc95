"""Serving a pair with another engine."""

import logging
from dataclasses import replace

from blockdraft.server.address import bind
from blockdraft.server.engines.child import run_engine
from blockdraft.server.engines.sglang import SGLANG
from blockdraft.server.engines.vllm import VLLM
from blockdraft.server.engines.wish import Wish, resolve_pair

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}

logger = logging.getLogger(__name__)


def serve_with(wish: Wish) -> int:
    """Start the engine that is wished for on the pair, until it ends; its exit status.

    Raises:
        ConfigError: the engine is not there or cannot honor an option, or the address is taken.
        ModelError: see `resolve_pair`.
    """
    engine = ENGINES[wish.engine.engine]
    engine.check(wish)
    # Taken and given back: the engine must take it itself. Who has it is told before a long start.
    with bind(wish.serve) as sock:
        wish = replace(wish, serve=replace(wish.serve, port=sock.getsockname()[1]))
    command = engine.command(wish, resolve_pair(wish))
    logger.info("%s answers: that drafted text equals plain text is not promised", engine.name)
    return run_engine(engine.name, command, wish.serve.host, wish.serve.port)
