"""The update of a drafter's weights: Muon or AdamW for the matrices, AdamW for all else.

The model computes in its own precision; float32 master copies take the updates, and an average of
them over the steps is what is evaluated and saved. Where processes share the parameters, all of
these are shares too, and norm and orthogonal update are still those of the whole matrices.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon

from blockdraft.kernels.backends import in_hardware
from blockdraft.train.config import TrainConfig
from blockdraft.train.sharing import share_like


def lr_share(progress: float, step: int, config: TrainConfig) -> float:
    """Share of the highest learning rate: linear warm-up over steps, cosine over the run.

    progress: 0 to 1, how much of the run is done.
    """
    warmup = min(1.0, (step + 1) / (config.warmup_steps + 1))
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return warmup * (config.min_lr_share + (1 - config.min_lr_share) * cosine)


BETAS = (0.9, 0.95)


class Float32Muon(Muon):
    """Muon whose orthogonal updates are computed in float32.

    torch's own computes them in bfloat16, which a CPU without instructions for it imitates: there
    nine tenths of a step went to it. The state is the same.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all matrices that have a gradient; there are no closures."""
        for group in self.param_groups:
            momentum, lr = group["momentum"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                average = state["momentum_buffer"].lerp_(param.grad, 1 - momentum)
                update = _orthogonal(param.grad.lerp(average, momentum), group)
                param.mul_(1 - lr * group["weight_decay"])
                # Of the size of AdamW's updates (arXiv 2502.16982).
                param.add_(update, alpha=-0.2 * lr * math.sqrt(max(param.shape)))


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """The nearest orthogonal matrix, nearly, by Newton-Schulz iterations (Jordan et al., 2024)."""
    if is_tall := update.shape[0] > update.shape[1]:
        update = update.T
    update = update / update.norm().clamp(min=group["eps"])
    linear, cubic, quintic = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = update @ update.T
        update = linear * update + (cubic * gram + quintic * gram @ gram) @ update
    return update.T if is_tall else update


def _matrix_optimizer(matrices: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return AdamW(matrices, lr=config.lr, betas=BETAS, weight_decay=config.weight_decay)
    imitates = not in_hardware(torch.bfloat16, matrices[0].device)
    return (Float32Muon if imitates else Muon)(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _is_matrix(name: str, parameter: Tensor) -> bool:
    """True for what maps vectors to vectors; rows of a codebook have nothing to do with others."""
    return parameter.ndim == 2 and not name.endswith("codebook")


class DraftOptimizer:
    """Owns the master weights of `model` and writes every update back into it.

    Parameters that want no gradient stay as they are.

    Muon (Jordan et al., 2024) with the step size matched to AdamW's (arXiv 2502.16982), so both
    share one learning rate.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self._config = config
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._params = [parameter for _, parameter in trained]
        self._masters = [nn.Parameter(p.detach().float().clone()) for p in self._params]
        self._gradients = [torch.zeros_like(master) for master in self._masters]
        self._averages = [master.detach().clone() for master in self._masters]
        self._step = 0
        named = zip((name for name, _ in trained), self._masters, strict=True)
        are_matrices = [_is_matrix(name, master) for name, master in named]
        pairs = list(zip(self._masters, are_matrices, strict=True))
        matrices = [master for master, is_matrix in pairs if is_matrix]
        others = [master for master, is_matrix in pairs if not is_matrix]
        self._optimizers = [_matrix_optimizer(matrices, config)]
        if others:  # OLMo's norms have no weights
            self._optimizers.append(AdamW(others, lr=config.lr, betas=BETAS, weight_decay=0.0))

    @torch.no_grad()
    def collect(self) -> None:
        """Add the model's gradients to those of this step, in float32, and clear them."""
        for param, gradient in zip(self._params, self._gradients, strict=True):
            if param.grad is not None:
                gradient += param.grad
            param.grad = None

    @property
    def gradients(self) -> list[Tensor]:
        """What `collect` has added up."""
        return self._gradients

    @torch.no_grad()
    def step(self, progress: float) -> tuple[float, float]:
        """Apply and clear the collected gradients; returns (learning rate, gradient norm)."""
        for gradient, master in zip(self._gradients, self._masters, strict=True):
            master.grad = gradient
        norm = float(nn.utils.clip_grad_norm_(self._masters, self._config.grad_clip))
        lr = self._config.lr * lr_share(progress, self._step, self._config)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        for gradient, master in zip(self._gradients, self._masters, strict=True):
            master.grad = None
            gradient.zero_()
        self._step += 1
        # A young average must not remember the start: it reaches its memory step by step.
        decay = min(self._config.ema_decay, self._step / (self._step + 10))
        torch._foreach_lerp_(self._averages, list(self._masters), 1 - decay)
        self.use_masters()
        return lr, norm

    def use_masters(self) -> None:
        """Put the newest weights into the model."""
        self._write(list(self._masters))

    def use_averages(self) -> None:
        """Put the averaged weights into the model; `use_masters` before the next step."""
        self._write(self._averages if self._config.ema_decay else list(self._masters))

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for param, value in zip(self._params, values, strict=True):
            param.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        return {
            "step": self._step,
            "masters": [master.detach() for master in self._masters],
            "averages": self._averages,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` with whole tensors; the model gets the master weights."""
        self._step = int(state["step"])
        for master, average, saved, saved_average in zip(
            self._masters, self._averages, state["masters"], state["averages"], strict=True
        ):
            master.copy_(share_like(saved, master))
            average.copy_(share_like(saved_average, average))
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(_shared_state(saved, optimizer))
        self.use_masters()


def _shared_state(saved: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state with whole tensors as one for the parameters, which may be shares."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    shared = {
        index: {
            # Beside tensors like the parameter there is a count of steps.
            name: share_like(value, params[index]) if value.shape == params[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
    }
    return saved | {"state": shared}
