"""What the trainer needs of a drafter, whatever its kind.

Shapes: b sequences of S tokens, g anchors of each, s slots behind each of them; D hidden size of
the target, V its vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F
from transformers import PreTrainedModel

from blockdraft.core.errors import ConfigError
from blockdraft.data.dataset import Batch
from blockdraft.data.store import Example
from blockdraft.models.draft.candidate_selector import CandidateSelector
from blockdraft.train.blocks import Anchors, Blocks, make_blocks
from blockdraft.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class DrafterShape:
    """What a run will train, known before anything is loaded.

    feature_layers: of the target, () if none are read. num_parameters: that are trained.
    reads_whole_rows: a forward is over all tokens of a row, not over slots. facts: JSON values.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    feature_layers: tuple[int, ...]
    num_parameters: int
    facts: Mapping[str, Any]
    reads_whole_rows: bool = False


class TrainedDrafter(Protocol):
    """A drafter in training; what is not left open here is what most kinds do.

    model: its parameters that want a gradient are trained. feature_layers: of the target; () if it
    reads none. num_slots: tokens that it guesses behind an anchor: s.
    """

    model: nn.Module
    feature_layers: tuple[int, ...]
    num_slots: int

    @property
    def candidate_selector(self) -> CandidateSelector | None:
        """Of DFlash 2, which has a loss of its own."""
        return None

    def describe(self) -> dict[str, Any]:
        """Its shape as JSON values."""
        config: Any = self.model.config
        return dict(config.to_dict())

    def limit_vocabulary(self, token_ids: Sequence[int] | None) -> None:
        """Let it guess these tokens only, or all."""
        ...

    def guessable_ids(self) -> Tensor | None:
        """Token ids [n] that `limit_vocabulary` has left; None if all."""
        return None

    def draw(self, anchors: Anchors, generator: torch.Generator) -> Anchors:
        """Decide what else is random in the blocks of these anchors."""
        return anchors

    def blocks(self, batch: Batch, anchors: Anchors) -> Blocks:
        """Inputs and labels behind the anchors [b, g]."""
        ...

    def context(self, features: Tensor, batch: Batch, embed_weight: Tensor) -> list[Tensor]:
        """What all blocks of a batch share, computed once; its gradient is collected over them.

        Args:
            features: [b, S, K * D] of the K `feature_layers`.
            batch: the tokens.
            embed_weight: [V, D] of the target.

        Returns:
            tensors whose first dimension is b.
        """
        ...

    def slots(
        self, context: Sequence[Tensor], blocks: Blocks, anchors: Anchors, embed_weight: Tensor
    ) -> Tensor:
        """Hidden states [b, g, s, D] of the slots behind the anchors, as they are trained."""
        ...

    def filled(
        self,
        context: Sequence[Tensor],
        blocks: Blocks,
        anchors: Anchors,
        embed_weight: Tensor,
        head: Tensor,
    ) -> Tensor:
        """The same as decoding has them, where all guesses before a slot are right."""
        return self.slots(context, blocks, anchors, embed_weight)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Hidden states [..., D] through rows [n, D] of the target's head -> [..., n].

        By no weights that are trained: their gradient is not collected, see `chunked_loss`.
        """
        return F.linear(hidden, head)

    def greedy_guesses(self, hidden: Tensor, logits: Tensor, anchors: Tensor) -> Tensor:
        """Token ids [b, s], from hidden states [b, s, D], their logits and anchors' tokens [b].

        Of the tokens that it may guess, as in decoding; the logits [b, s, V] are of all.
        """
        ids = self.guessable_ids()
        return logits.argmax(dim=-1) if ids is None else ids[logits[..., ids].argmax(dim=-1)]

    def share(self, config: TrainConfig, mesh: DeviceMesh) -> None:
        """Leave each process a share of each parameter.

        Raises:
            ConfigError: the kind cannot be shared out.
        """
        ...

    def whole(self, is_main: bool) -> Self:
        """The drafter with whole weights, for the main process; all processes call it."""
        return self

    def save_pretrained(
        self, folder: str | Path, provenance: Mapping[str, Any] | None = None
    ) -> None:
        """Write it as serving loads it."""
        model: Any = self.model
        model.save_pretrained(folder, provenance)


class TeacherForced(TrainedDrafter):
    """What the kinds share that read the tokens before a slot, and do not fill a block at once.

    In training these are the answer's. A guess counts only if all before it are right, so they are
    those of decoding wherever it matters, in the offline tau too.
    """

    def __init__(self, block_size: int) -> None:
        self.num_slots = block_size - 1

    def blocks(self, batch: Batch, anchors: Anchors) -> Blocks:
        """See TrainedDrafter.blocks: the answer's own tokens."""
        return make_blocks(batch, anchors, self.num_slots + 1, None)

    def share(self, config: TrainConfig, mesh: DeviceMesh) -> None:
        """See TrainedDrafter.share: `refuse_settings` has refused it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Kind:
    """How a drafter of a kind comes about.

    shape: from (config, target with or without weights, all examples, number of processes). load:
    from (config, target, all examples), in the precision of the run. Both raise ConfigError for
    settings that cannot be met, and ModelError for a target that does not fit. has_target_weights:
    it is saved with weights of the target, its head for instance.
    """

    shape: Callable[[TrainConfig, PreTrainedModel, Sequence[Example], int], DrafterShape]
    load: Callable[[TrainConfig, PreTrainedModel, Sequence[Example]], TrainedDrafter]
    has_target_weights: bool = False


def refuse_settings(config: TrainConfig, kind: str, names: Sequence[str]) -> None:
    """Raise ConfigError for a setting that a kind of drafter has no use for."""
    for name in names:
        value = getattr(config, name)
        if value not in (None, False):
            raise ConfigError(
                f"{name} is {value}, and a drafter of architecture={kind} has none; leave it out"
            )


def num_trained(model: nn.Module) -> int:
    """Parameters that want a gradient."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
