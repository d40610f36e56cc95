"""Attention of many sequences packed in one row, over K/V in pages, for transformers models.

They call the registered function layer by layer, and it follows the plan of the target whose model
it is.
"""

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from blockdraft.kernels.interface import Scoring
from blockdraft.models.attention.plan import LayerAttention, PlanInForce
from blockdraft.models.attention.visibility import Visibility

PAGED_ATTENTION = "blockdraft_paged"
IN_FORCE = "blockdraft_plan_in_force"
"""Attribute of the attention modules of a paged target: its PlanInForce."""


def give_plan(model: PreTrainedModel, in_force: PlanInForce) -> ExitStack:
    """Let the attention of a model follow what is in force; closing undoes it."""
    undo = ExitStack()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            vars(module)[IN_FORCE] = in_force
            undo.callback(vars(module).pop, IN_FORCE)
    return undo


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """For transformers' attention interface; heads as in `exact_attention`, all rows packed."""
    layer: Any = module.layer_idx
    in_force: PlanInForce = getattr(module, IN_FORCE)
    assert in_force.plan is not None, "no plan is in force"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attention = LayerAttention(Scoring(scale, softcap, s_aux), Visibility(window=sliding_window))
    pool = in_force.pool_of(layer)
    output = in_force.plan.attend(pool, attention, query[0], key[0], value[0])
    # Contiguous: some models view it in another shape.
    return output[None].contiguous(), None


# No mask function is registered under this name, so transformers makes no mask.
AttentionInterface.register(PAGED_ATTENTION, paged_attention)
