"""Activations that backends know."""

from torch import nn
from transformers.activations import ACT2FN

_SILU = nn.SiLU, type(ACT2FN["silu"])
"""Looked up once: the table makes a new module each time that it is asked."""


def is_silu(activation: object) -> bool:
    """True for torch's own and transformers'."""
    return isinstance(activation, _SILU)
