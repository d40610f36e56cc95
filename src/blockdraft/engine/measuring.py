"""Setting an engine up to be measured."""

import torch

from blockdraft.cache.pages import Pages
from blockdraft.engine.engine import Engine
from blockdraft.engine.ledger import PhaseTimer


def compute_every_prompt(engine: Engine) -> None:
    """Turn off the reuse of prompts: runs repeat each other's, and would find them in memory."""
    memory = engine.target.memory
    if isinstance(memory, Pages):
        memory.reuse = False


def time_phases(engine: Engine, device: str) -> None:
    """Time the phases of every step from now on; on a GPU each waits until the device is done."""
    on_gpu = torch.device(device).type == "cuda"
    engine.timer = PhaseTimer(synchronize=torch.cuda.synchronize if on_gpu else None)
