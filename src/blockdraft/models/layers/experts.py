"""Experts whose rows do not depend on the rows beside them.

A router gives an expert any share of a forward's rows, one row included, and kernels give other
bits to few rows. Here each share is filled up like every other forward. transformers models call
this through their experts interface.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from blockdraft.kernels.torch.vectors import rows_in_whole_vectors

EXACT_EXPERTS = "blockdraft_exact"
ROW_MULTIPLE = "blockdraft_row_multiple"
"""Attribute of the experts that holds the multiple to which their shares are filled up."""
APART = "blockdraft_apart"
"""Attribute of the experts that holds those of their weights which are stacked no longer: under
the name of each a list of linear layers, one an expert."""
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
"""What stacked weights are called, of which experts have two."""


def stacked_experts(model: nn.Module) -> list[Any]:
    """Those in the form of transformers' experts interface; some never ask it (Step 3.7)."""
    return [module for module in model.modules() if hasattr(module, "_apply_gate")]


def set_row_multiple(model: PreTrainedModel, row_multiple: int) -> None:
    """Tell the model's experts how their shares are filled up."""
    for module in stacked_experts(model):
        setattr(module, ROW_MULTIPLE, 1 if _keeps_any_rows(module) else row_multiple)


def _keeps_any_rows(experts: Any) -> bool:
    """True if only quantized products, which keep their rows, and a gate in whole vectors run."""
    has_norm = getattr(experts, "has_post_expert_norm", False)
    return len(getattr(experts, APART, ())) == 2 and experts.has_gate and not has_norm


def forget_row_multiple(model: PreTrainedModel) -> None:
    """Undo `set_row_multiple`."""
    for module in model.modules():
        vars(module).pop(ROW_MULTIPLE, None)


def exact_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """For transformers' experts interface.

    hidden_states: [rows, D]; top_k_index, top_k_weights: [rows, k].
    Returns [rows, D]; a row's k parts are summed in the order of its router.
    """
    experts: Any = module
    num_rows, top_k = top_k_index.shape
    row_multiple = getattr(module, ROW_MULTIPLE, 1)
    parts = hidden_states.new_zeros(num_rows * top_k, hidden_states.shape[1])
    by_expert = top_k_index.flatten().argsort(stable=True)
    counts = top_k_index.flatten().bincount(minlength=experts.num_experts)
    for expert, pairs in enumerate(torch.split(by_expert, counts.tolist())):
        if pairs.shape[0]:
            num_fill = -pairs.shape[0] % row_multiple
            rows = torch.cat((pairs, pairs[-1:].expand(num_fill))) // top_k
            parts[pairs] = _run(experts, expert, hidden_states[rows])[: pairs.shape[0]]
    weighted = parts.view(num_rows, top_k, -1) * top_k_weights[:, :, None].to(parts.dtype)
    output = weighted[:, 0]
    for slot in range(1, top_k):
        output = output + weighted[:, slot]
    return output


def _run(experts: Any, expert: int, rows: Tensor) -> Tensor:
    """One expert's [rows, D] -> [rows, D]."""
    if experts.has_gate:
        gate_up = _linear(experts, "gate_up_proj", expert, rows)
        inner = rows_in_whole_vectors(experts._apply_gate, gate_up, gate_up.shape[-1] // 2)
    else:
        inner = experts.act_fn(_linear(experts, "up_proj", expert, rows))
    output = _linear(experts, "down_proj", expert, inner)
    # Older versions of transformers know no such norm.
    has_norm = getattr(experts, "has_post_expert_norm", False)
    return experts.post_expert_norm(output) if has_norm else output


def _linear(experts: Any, name: str, expert: int, rows: Tensor) -> Tensor:
    apart = getattr(experts, APART, {})
    if name in apart:
        found: Tensor = apart[name][expert](rows)
        return found
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(rows, weight.T if experts.is_transposed else weight, bias)


ALL_EXPERTS_FUNCTIONS.register(EXACT_EXPERTS, exact_experts)
