"""What a measurement or a proof was made with: environment and resolved config."""

from dataclasses import asdict
from typing import Any, Protocol

import torch

from blockdraft.core.config import LLMConfig
from blockdraft.measure.provenance import describe_environment


class Loaded(Protocol):
    """What is asked of a loaded pair."""

    config: LLMConfig
    dtype: torch.dtype
    device: str


def describe_setting(llm: Loaded) -> dict[str, Any]:
    """Plain values for JSON: what is needed to repeat anything."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "config": asdict(llm.config)
        | {"dtype": str(llm.dtype).removeprefix("torch."), "device": llm.device},
    }
