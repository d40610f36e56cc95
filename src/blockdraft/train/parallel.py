"""Several processes that train one drafter, started by `torchrun` or `accelerate launch`.

Every process takes its share of a batch's rows, and adds its gradients to those of the others. The
collectives of torch.distributed are called directly: DistributedDataParallel expects one backward
pass a step, and a step here has one for each group of blocks. Drafter and target are held whole, or
shared out by FSDP2.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError
from blockdraft.core.words import counted
from blockdraft.models.supported import decoder_layers
from blockdraft.models.target.loading import resolve_device
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.sharing import num_held

PATIENCE = timedelta(hours=2)
"""Others wait while the first process evaluates."""


def launched() -> tuple[int, int]:
    """(number of this process, how many there are), as the launcher says; (0, 1) without one.

    Raises:
        ConfigError: the environment says what no launcher does.
    """
    rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
        raise ConfigError(
            f"RANK is {rank!r} and WORLD_SIZE {count!r} in the environment; start the run with "
            "torchrun, which sets both, or unset them"
        )
    return int(rank), int(count)


def resolve_own_device(name: str) -> str:
    """`resolve_device`, for this one of the processes that train together.

    Its GPU becomes the current one before anything is asked of one: else each process would open a
    context on the first, which takes some hundred MiB of it.

    Raises:
        ConfigError: the device is not usable, all processes would have the same GPU, or there is
            none for this one.
    """
    _, count = launched()
    if count > 1 and name.startswith("cuda:"):
        raise ConfigError(
            f"device is {name!r}, and {count} processes train together, which would share it; give "
            "cuda: each takes the GPU of its number"
        )
    if count > 1 and name != "cpu" and torch.cuda.is_available():
        local, num_gpus = os.environ.get("LOCAL_RANK", "0"), torch.cuda.device_count()
        if not local.isdecimal() or int(local) >= num_gpus:
            raise ConfigError(
                f"LOCAL_RANK is {local!r}, and CUDA finds {counted(num_gpus, 'GPU')}; start at "
                "most one process for each, or give device=cpu"
            )
        torch.cuda.set_device(int(local))
    return resolve_device(name)


def check_sharing(config: TrainConfig, count: int) -> None:
    """Raise ConfigError for what so many processes cannot do.

    Such as sharing the target or the drafter with nobody.
    """
    if count > 1 and config.device_map is not None:
        raise ConfigError(
            f"device_map spreads the target over all devices, and each of {count} processes would "
            "do so; start one process, or give shard_target=true instead"
        )
    for name in ("shard_target", "shard_drafter"):
        if count == 1 and getattr(config, name):
            raise ConfigError(
                f"{name} shares the {name.removeprefix('shard_')} among processes, but there is "
                "only one; start several with torchrun (for a plan, set WORLD_SIZE), or leave it "
                "out"
            )


class Processes:
    """The processes of this run; one, unless a launcher started more.

    Args:
        device: of this process, see `resolve_own_device`.
        alone: leave the others out, if there are any.

    Raises:
        ConfigError: the environment tells of others, and no launcher has started them.
    """

    def __init__(self, device: str, *, alone: bool = False) -> None:
        self.rank, self.count = (0, 1) if alone else launched()
        on_gpu = torch.device(device).type == "cuda"
        self._device = "cuda" if on_gpu else "cpu"
        if self.count == 1:
            return
        if not dist.is_initialized():
            if "MASTER_ADDR" not in os.environ:
                raise ConfigError(
                    f"WORLD_SIZE is {self.count} in the environment, but no launcher has started "
                    "that many processes; use torchrun, or unset it, which is for --plan only"
                )
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)

    @property
    def is_main(self) -> bool:
        """True for the one that writes, measures and decides."""
        return self.rank == 0

    def share_of_rows(self, num_rows: int) -> slice:
        """Which rows of a batch are this process's; neighbors in length go to different ones."""
        return slice(self.rank, num_rows, self.count)

    def decided(self, values: Sequence[float]) -> list[float]:
        """The main process's values, in all of them."""
        return self._together(values, lambda tensor: dist.broadcast(tensor, 0))

    def summed(self, values: Sequence[float]) -> list[float]:
        """The values added up over the processes."""
        return self._together(values, dist.all_reduce)

    def _together(
        self, values: Sequence[float], collective: Callable[[Tensor], object]
    ) -> list[float]:
        if self.count == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._device)
        collective(tensor)
        result: list[float] = tensor.tolist()
        return result

    def sum_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Add up the gradients of all processes, in place; FSDP has done so with shares."""
        if self.count == 1:
            return
        for gradient in gradients:
            if not isinstance(gradient, DTensor):
                dist.all_reduce(gradient)

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""

        def largest(tensor: Tensor) -> None:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

        return int(self._together([number], largest)[0])

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return init_device_mesh(self._device, (self.count,))

    def share_drafter(self, drafter: TrainedDrafter, config: TrainConfig) -> int:
        """Leave each process a share of each parameter, see `sharing.share_parameters`.

        Returns how many of the drafter's parameters this process holds.
        """
        drafter.share(config, self._mesh)
        return num_held(drafter.model)

    def share_layers(self, model: PreTrainedModel) -> int:
        """Leave each process a share of each decoder layer, and all of what is beside them.

        The weights of a layer come together for its forward, so a forward is one of all processes.
        Returns how many of the model's parameters this process holds.
        """
        for layer in decoder_layers(model.requires_grad_(False)):
            fully_shard(layer, mesh=self._mesh, reshard_after_forward=True)
        model.to(self._device)
        return num_held(model)

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Part from the others."""
        if self.count > 1:
            dist.destroy_process_group()
