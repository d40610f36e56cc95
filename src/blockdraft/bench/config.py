"""Options of a speed measurement. Loads no model library."""

from dataclasses import dataclass

from blockdraft.core.errors import ConfigError
from blockdraft.core.request import SamplingParams

WARM_UP_TOKENS = 16
"""Tokens of every way to decode, before anything is timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedConfig:
    """How to decode. `block`: most slots of a block, the anchor included; None: the drafter's."""

    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    block: int | None = None
    with_transformers: bool = True

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 2:
            raise ConfigError(f"block is {self.block}; give at least 2, the anchor and one draft")

    @property
    def params(self) -> SamplingParams:
        """The drafted request."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.seed,
            speculative=True if self.block is None else self.block - 1,
        )
