"""Rotations of type longrope, chosen by the request and not by the moment.

transformers turns all positions of a forward by long factors once one of them lies beyond the
original context. So a neighbor, a draft or a longer answer would change what is there already. Here
a text that may ever become longer than the original context is turned by long factors from its
first token on, and any other by short ones.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from blockdraft.models.layers.packed import replace_forward
from blockdraft.models.supported import longrope_modules

Rows = bool | Tensor
"""Whether long factors turn all rows of a forward, or which of them, [rows]."""


class RequestRotation:
    """Holds which rows of the forward that runs belong to long texts.

    long_from: texts of more tokens are long; None if the model has no such rotation.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._modules = longrope_modules(model)
        lengths = {
            module.config.rope_parameters["original_max_position_embeddings"]
            for module in self._modules
        }
        self.long_from: int | None = min(lengths, default=None)
        self.is_long: Rows = False

    def follow(self, is_long: Iterable[bool], num_rows: int, device: torch.device) -> None:
        """Of the rows of the next forward; those that fill it up are turned as the last."""
        found = list(is_long)
        if all(found) or not any(found):
            self.is_long = all(found)
            return
        found += found[-1:] * (num_rows - len(found))
        self.is_long = torch.tensor(found, device=device)

    def replace(self) -> ExitStack:
        """Let the model's rotations follow; closing gives them back."""
        undo = ExitStack()
        for module in self._modules:
            undo.callback(_restore, module, module.rope_type, module.inv_freq.clone())
            # transformers would choose anew before each forward.
            module.rope_type = "default"
            kinds = _frequencies(module)
            if hasattr(module, "rope_init_fn"):  # Phi-3.5-MoE: its forward asks this one anew
                undo.callback(setattr, module, "rope_init_fn", module.rope_init_fn)
                module.rope_init_fn = partial(_present, module)
            replace_forward(module, partial(self._rotate, module, module.forward, kinds), undo)
        return undo

    def _rotate(
        self, module: Any, own: Any, kinds: tuple[Tensor, Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        """As the module's own forward: cosines and sines [b, rows, size]."""
        is_long = self.is_long
        if isinstance(is_long, bool):
            module.inv_freq.copy_(kinds[is_long])
            return own(*args, **kwargs)
        both = []
        for inv_freq in kinds:
            module.inv_freq.copy_(inv_freq)
            both.append(own(*args, **kwargs))
        return tuple(
            torch.where(is_long[:, None], long, short) for short, long in zip(*both, strict=True)
        )


def _present(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, float]:
    """The frequencies that a module has now, and by what cosines and sines are multiplied."""
    return module.inv_freq, module.attention_scaling


def _frequencies(module: Any) -> tuple[Tensor, Tensor]:
    """Of short texts and of long ones."""
    length = module.config.rope_parameters["original_max_position_embeddings"]
    init, device = ROPE_INIT_FUNCTIONS["longrope"], module.inv_freq.device
    short, _ = init(module.config, device, seq_len=length)
    long, _ = init(module.config, device, seq_len=length + 1)
    return short.to(module.inv_freq.dtype), long.to(module.inv_freq.dtype)


@torch.no_grad()
def _restore(module: nn.Module, rope_type: str, inv_freq: Tensor) -> None:
    own: Any = module
    own.rope_type = rope_type
    own.inv_freq.copy_(inv_freq)
