"""How much a proof does. Loads no model library."""

from dataclasses import dataclass, fields
from typing import Any

from blockdraft.core.errors import ConfigError
from blockdraft.core.request import MAX_SEED, SamplingParams, check_count
from blockdraft.core.settings import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofConfig:
    """What a proof runs; the same values on the same machine give the same certificate.

    max_tokens: most tokens of an output. seed: of the first case; each has one of its own.
    num_settings: ways to sample that each prompt is decoded with, in rotation over the prompts.
    one_of_a_kind: take the first prompt of each kind of the corpus only.
    num_context_cases, num_stock_prompts, num_noise_cases: prompts whose draft context is computed
    again, prompts that transformers decodes too, and cases that measure the noise (exact off).
    num_control_cases: cases that a planted fault is tried on at most.
    num_draws: samples of each distribution.

    Raises:
        ConfigError, RequestError: a value is out of its range.
    """

    max_tokens: int = 64
    seed: int = 1
    num_settings: int = 3
    one_of_a_kind: bool = False
    num_context_cases: int = 6
    num_stock_prompts: int = 16
    num_noise_cases: int = 24
    num_control_cases: int = 12
    num_draws: int = 20_000

    def __post_init__(self) -> None:
        SamplingParams(max_tokens=self.max_tokens)
        # A seed that is drawn would be another one each time that a case is decoded.
        check_count("seed", self.seed, 0, MAX_SEED)
        require(self, "one_of_a_kind", isinstance(self.one_of_a_kind, bool), "true or false")
        for name in (one.name for one in fields(self) if one.name.startswith("num_")):
            value, least = getattr(self, name), int(name in NEEDED)
            is_good = type(value) is int and least <= value <= MOST
            require(self, name, is_good, f"a whole number from {least} to {MOST:,}")
        if self.max_tokens < LEAST_TOKENS:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}; a proof needs at least {LEAST_TOKENS}"
            )


NEEDED = ("num_settings", "num_control_cases", "num_draws")
"""Counts without which nothing would be proven."""
MOST = 1_000_000
"""Of any count: days of work."""
LEAST_TOKENS = 8
"""Shorter outputs have hardly a block that can be rejected."""

QUICK: dict[str, Any] = {
    "max_tokens": 24,
    "num_settings": 1,
    "one_of_a_kind": True,
    "num_context_cases": 2,
    "num_stock_prompts": 6,
    "num_noise_cases": 8,
    "num_draws": 2_500,
}
"""What `--quick` changes: about two minutes on two cores with the default pair."""
