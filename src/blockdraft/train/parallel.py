"""Several processes that train one drafter, started by `torchrun` or `accelerate launch`.

Every process holds the drafter and the target, takes its share of a batch's rows, and adds its
gradients to those of the others. The collectives of torch.distributed are called directly:
DistributedDataParallel expects one backward pass a step, and a step here has one for each group of
blocks.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(hours=2)
"""Others wait while the first process evaluates."""


def launched() -> tuple[int, int]:
    """(number of this process, how many there are), as the launcher says; (0, 1) without one."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Processes:
    """The processes of this run; one, unless a launcher started more."""

    def __init__(self, device: str) -> None:
        self.rank, self.count = launched()
        on_gpu = torch.device(device).type == "cuda"
        self._device = "cuda" if on_gpu else "cpu"
        if self.count == 1:
            return
        if on_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
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
        """Add up the gradients of all processes, in place."""
        if self.count == 1:
            return
        for gradient in gradients:
            dist.all_reduce(gradient)

    def wait(self) -> None:
        """Until all have come here."""
        if self.count > 1:
            dist.barrier()

    def close(self) -> None:
        """Part from the others."""
        if self.count > 1:
            dist.destroy_process_group()
