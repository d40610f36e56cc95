"""Two drafters as bad as can be, at the cost of the real one: what an engine must survive."""

from typing import Literal

import torch

from blockdraft.core.errors import ConfigError
from blockdraft.llm import LLM
from blockdraft.models.draft import DraftModel
from blockdraft.speculate.drafters.dflash import DFlashDrafter

Fault = Literal["noise", "wrong"]


def spoil(llm: LLM, fault: Fault) -> None:
    """Make a loaded drafter bad, in place.

    "noise": random weights of the same shapes. "wrong": every guess becomes its neighbor in the
    vocabulary, so a drafter that was right is wrong.

    Raises:
        ConfigError: there is no drafter.
    """
    drafter = llm.engine.drafter
    if not isinstance(drafter, DFlashDrafter):
        raise ConfigError(f"there is no drafter to make {fault}; name one with --drafter")
    if fault == "noise":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            drafter.model.load_state_dict(DraftModel(drafter.model.config).state_dict())
    else:
        # A row of the head is a token's score, so each token takes over its neighbor's.
        drafter.lm_head_weight = drafter.lm_head_weight.roll(1, dims=0)
