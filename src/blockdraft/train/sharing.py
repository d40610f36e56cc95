"""A drafter whose parameters are shared out over the processes by FSDP2.

What is made like these parameters (masters, gradients, averages, states of the optimizer) consists
of the same shares: torch computes with all of them as DTensors.
"""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from blockdraft.core.errors import ConfigError
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.train.config import TrainConfig


def share_parameters(model: DraftModel, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Leave this process a share of each of the drafter's parameters, in place.

    The weights of a layer come together for its forward and its backward, so each of these is one
    of all processes. Every backward adds up the gradients of all processes.

    Raises:
        ConfigError: Muon would get matrices with fewer rows than there are processes.
    """
    check_rows(model, config, mesh.size())
    # A sum of many bfloat16 gradients rounds once.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    own = (model.fc, *model.draft_layers(), model.candidate_selector, model)
    for unit in (part for part in own if part is not None):
        shared = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        _add_up_gradients(shared)
    # The context enters the layers by another method than the blocks do.
    for layer in model.draft_layers():
        register_fsdp_forward_method(layer, "context_keys_values")
    register_fsdp_forward_method(model, "project_context")
    # Keys and values are views of what the projections return; nothing writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view", UserWarning)


def check_rows(model: DraftModel, config: TrainConfig, count: int) -> None:
    """Raise ConfigError if Muon would get matrices with fewer rows than there are processes."""
    rows = min(len(parameter) for parameter in model.parameters() if parameter.ndim == 2)
    if config.optimizer == "muon" and rows < count:
        raise ConfigError(
            f"shard_drafter shares each matrix by rows among {count} processes, and Muon cannot "
            f"update one that has only {rows}; use optimizer=adamw, or at most {rows} processes"
        )


def _add_up_gradients(shared: FSDPModule) -> None:
    """The loss is a mean over the slots of all processes already, and FSDP would take another."""
    shared.set_gradient_divide_factor(1.0)
    shared.set_force_sum_reduction_for_comms(True)  # gloo knows no other


def num_held(model: nn.Module) -> int:
    """How many of the model's parameters this process holds."""
    held = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.numel() for p in held)


def whole_drafter(model: DraftModel, is_main: bool) -> DraftModel:
    """The drafter with whole weights, for the main process; the others get `model` back.

    All processes call it. A drafter that is not shared out is whole as it is.
    """
    if not isinstance(model, FSDPModule):
        return model
    device = model.fc.weight.device
    tensors = whole_tensors(model.state_dict(), is_main)
    if not is_main:
        return model
    with torch.device("meta"):
        whole = DraftModel(model.config)
    whole.load_state_dict({k: v.to(device) for k, v in tensors.items()}, assign=True)
    whole.draft_vocabulary = model.draft_vocabulary
    return whole


def whole_tensors(state: dict[str, Any], is_main: bool) -> dict[str, Any]:
    """A state with its shares replaced by whole tensors on the CPU, for the main process.

    All processes call it; the others get empty tensors. What is not shared out stays as it is.
    """

    def gather(share: DTensor) -> Tensor:
        whole = share.full_tensor()
        return whole.cpu() if is_main else whole.new_empty(0)

    result: dict[str, Any] = tree_map_only(DTensor, gather, state)
    return result


def share_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's share of a tensor that all have, if `like` [same shape] is shared out."""
    if not isinstance(like, DTensor):
        return whole
    # Every process has read the same file: none sends anything.
    return distribute_tensor(
        whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None
    )
