"""How a Hydra head learns: at each place of the answers, the target's distribution.

The loss is the divergence from the target over the tokens that the head guesses, one, two and three
tokens ahead, with the head's own states in place of features further ahead, as EAGLE-3 is trained
(arXiv 2503.01840).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.core.errors import ConfigError
from blockdraft.core.words import counted
from blockdraft.models.draft.hydra_head import HydraHead
from blockdraft.train.features import FrozenTarget
from blockdraft.train.hydra.places import Batch, Places

WEIGHTS = (1.0, 0.8, 0.6)
"""Of the losses one, two and three tokens ahead."""
DROPOUT = 0.1
"""Of features."""
RISE = 0.03
"""Of the training, in which the learning rate rises."""
LAST_RATE = 0.02
"""Of the learning rate, at the beginning and at the end."""
WEIGHT_DECAY = 0.05
"""Of matrices."""


class HeadLearner:
    """A head and its optimizer, AdamW; all on the target's device.

    num_steps, num_places: that it has learned from.
    """

    def __init__(self, head: HydraHead, target: FrozenTarget, lr: float) -> None:
        self.head, self.num_steps, self.num_places = head.train(), 0, 0
        self._lr, self._embed_weight = lr, target.embed_weight
        self._lm_head = target.lm_head_weight[head.token_ids]
        parameters = list(head.named_parameters())
        matrices = [own for name, own in parameters if name.endswith(".weight")]
        vectors = [own for name, own in parameters if not name.endswith(".weight")]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, batch: Batch, progress: float) -> Tensor:
        """Learn from a batch; returns its divergence one token ahead.

        progress: the share of the training that is done. The learning rate rises at first, and
        then falls as half a cosine.
        """
        falling = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        rate = LAST_RATE + (1 - LAST_RATE) * falling
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * rate * min(1.0, LAST_RATE + progress / RISE)
        self._optimizer.zero_grad()
        with torch.autocast(self._embed_weight.device.type, torch.bfloat16):
            losses = self._losses(batch)
        loss = torch.stack([w * own for w, own in zip(WEIGHTS, losses, strict=True)]).sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self._optimizer.step()
        self.num_steps += 1
        self.num_places += len(batch[-1])
        return losses[0].detach()

    def _losses(self, batch: Batch) -> list[Tensor]:
        """Divergences, Kullback-Leibler in nats, means over the places, by tokens ahead."""
        features, tokens, final, places = batch
        with torch.no_grad():
            logits = final.flatten(0, 1)[places].to(self._lm_head.dtype) @ self._lm_head.T
            known = torch.log_softmax(logits.float(), -1)
        if self.head.training:
            features = torch.nn.functional.dropout(features.float(), DROPOUT)
        embeddings = self._embed_weight[tokens].float()
        found = []
        for hidden in self.head(features.float(), embeddings, len(WEIGHTS)):
            read = hidden.flatten(0, 1)[places].to(self._lm_head.dtype)
            logits = torch.nn.functional.linear(read, self._lm_head).float() + self.head.bias
            guessed = torch.log_softmax(logits, -1)
            found.append((known.exp() * (known - guessed)).sum(-1).mean())
        return found

    @torch.no_grad()
    def divergences(self, places: Places) -> list[float]:
        """Of these answers, by tokens ahead, without dropout: means over their places, in nats."""
        rows = list[Tensor]()
        self.head.eval()
        for batch in places.batches(torch.Generator()):
            own = self._losses(batch)
            rows.append(torch.stack([*own, own[0].new_ones(())]) * len(batch[-1]))
        self.head.train()
        *sums, number = torch.stack(rows).sum(0).tolist()
        return [one / number for one in sums]

    def check_finite(self, divergences: Sequence[float] = ()) -> None:
        """Raise ConfigError if weights, or divergences that they gave, are no finite numbers."""
        good = all(bool(own.isfinite().all()) for own in self.head.parameters())
        if not good or not all(map(math.isfinite, divergences)):
            steps = counted(self.num_steps, "step")
            raise ConfigError(
                f"lr is {self._lr:g}, and after {steps} the head's weights or divergences are no "
                "longer finite numbers; lower it"
            )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes up."""
        return {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "num_steps": self.num_steps,
            "num_places": self.num_places,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state of a head of the same shape."""
        self.head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self.num_places = int(state["num_steps"]), int(state["num_places"])
