"""Serving a pair with another engine."""

import logging
from dataclasses import replace

from blockdraft.server.address import bind
from blockdraft.server.engines.child import run_engine
from blockdraft.server.engines.settings import EngineSettings, resolve_pair
from blockdraft.server.engines.sglang import SGLANG
from blockdraft.server.engines.vllm import VLLM

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}

logger = logging.getLogger(__name__)


def serve_with(settings: EngineSettings) -> int:
    """Run the pair with the engine that is asked for, until it ends; its exit status.

    Raises:
        ConfigError: the engine is not there or cannot honor an option, or the address is taken.
        ModelError: see `resolve_pair`.
    """
    engine = ENGINES[settings.engine.engine]
    engine.check(settings)
    # Taken and given back: the engine must take it itself. Who has it is told before a long start.
    with bind(settings.serve) as sock:
        settings = replace(settings, serve=replace(settings.serve, port=sock.getsockname()[1]))
    command = engine.command(settings, resolve_pair(settings))
    logger.info("%s answers: drafted text is not guaranteed to equal plain text", engine.name)
    return run_engine(engine.name, command, settings.serve.host, settings.serve.port)
