"""How to start another engine. Every default stands here, once."""

import sys
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.core.errors import ConfigError

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Another engine, and what only it has options for.

    engine: its name.
    python: an interpreter whose environment holds it.
    tensor_parallel, pipeline_parallel, data_parallel: devices that share each layer, groups of
    layers, and copies of the model.
    extra: options of the engine's own, handed on as they are.

    Raises:
        ConfigError: a value is out of its range.
    """

    engine: EngineName
    python: str = field(default_factory=lambda: sys.executable)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name} is {value}; give a whole number of at least 1")
