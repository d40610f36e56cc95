"""What a measurement or a proof was made with: environment and resolved config."""

from dataclasses import asdict
from typing import Any

import torch

from blockdraft.measure.identity import LoadedTarget
from blockdraft.measure.provenance import describe_environment


def describe_setting(llm: LoadedTarget) -> dict[str, Any]:
    """Plain values for JSON: what is needed to repeat anything."""
    return {
        **describe_environment(),
        "threads": torch.get_num_threads(),
        "config": asdict(llm.config)
        | {"dtype": str(llm.dtype).removeprefix("torch."), "device": llm.device},
    }
