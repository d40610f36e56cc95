"""Norms of a model on a card, so that each row is summed as if it were alone.

torch shares the sum of a row among more threads where there are fewer rows. Layers that are fused
have the backend's norms already; the one before the head is among the others.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.kernels.backends import backend_for
from blockdraft.kernels.interface import Backend
from blockdraft.kernels.weights import Norm
from blockdraft.models.layers.common_kinds import common_kinds, kind_of
from blockdraft.models.layers.packed import is_plain, replace_forward

NORM_KINDS = common_kinds("RMSNorm")
"""Those that round before the weight is applied, and after it again."""


def replace_norms(model: PreTrainedModel) -> ExitStack:
    """Let the norms of known kinds be computed by the model's backend.

    Returns:
        what gives the model back as it was when closed.
    """
    undo = ExitStack()
    backend = backend_for(model.dtype, model.device)
    for module in model.modules():
        if kind_of(module) in NORM_KINDS and is_plain(module):
            norm = llama_norm(module)
            replace_forward(module, partial(_normed, backend, norm), undo)
    return undo


def replaced_norm(module: nn.Module) -> Norm | None:
    """What a norm computes that was replaced in this way; None of others."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or forward.func is not _normed:
        return None
    norm: Norm = forward.args[1]
    return norm


def llama_norm(module: Any) -> Norm:
    """What a norm of one of these kinds is made of.

    Raises:
        AttributeError: it keeps a part elsewhere.
    """
    return Norm(module.weight.detach().contiguous(), module.variance_epsilon, rounds_first=True)


def _normed(backend: Backend, norm: Norm, hidden_states: Tensor) -> Tensor:
    """[..., size] -> the same, with the argument of the model's own norm."""
    return backend.norm(hidden_states, norm)
