"""How many tokens a drafter would gain on held-out answers, without decoding anything.

The walk over an answer is that of decoding with the answer as the target's choices: from anchor to
anchor, each time as far as the draft agrees and one token more. On greedy answers it is decoding.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdraft.data.dataset import Batch, collate
from blockdraft.data.identity import texts_sha256
from blockdraft.data.store import Example
from blockdraft.train.blocks import Anchors, Blocks
from blockdraft.train.features import FrozenTarget
from blockdraft.train.kinds.base import TrainedDrafter

BATCH_SEQUENCES = 32


@dataclass(frozen=True, kw_only=True)
class HeldOutMetrics:
    """tau: acceptance length, bonus included, over all cycles; tau_by_set: within each set.

    loss: cross entropy over the whole vocabulary, mean over the slots of the visited blocks;
    accuracy: share of right guesses at slots 1, 2, .. behind the anchor, whatever came before.
    marginal_tau: what tau would be if slots were right or wrong independently of each other, one
    plus the sum of the products of `accuracy`; other trainers report it as expected length.
    """

    tau: float
    tau_by_set: Mapping[str, float]
    loss: float
    accuracy: Sequence[float]
    marginal_tau: float


@dataclass
class _Tally:
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    cycles: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nll: float = 0.0
    right: Tensor | None = None
    slots: Tensor | None = None

    def add_slots(self, nll: Tensor, right: Tensor, keep: Tensor) -> None:
        """All [rows, s]."""
        self.nll += float((nll * keep).sum())
        sums = (right & keep).sum(0).cpu(), keep.sum(0).cpu()
        self.right = sums[0] if self.right is None else self.right + sums[0]
        self.slots = sums[1] if self.slots is None else self.slots + sums[1]

    def metrics(self) -> HeldOutMetrics:
        """What was added so far; there must be something."""
        assert self.right is not None
        assert self.slots is not None
        accuracy = self.right / self.slots.clamp(min=1)
        return HeldOutMetrics(
            tau=sum(self.tokens.values()) / sum(self.cycles.values()),
            tau_by_set={
                name: self.tokens[name] / self.cycles[name] for name in sorted(self.cycles)
            },
            loss=self.nll / max(1, int(self.slots.sum())),
            accuracy=accuracy.tolist(),
            marginal_tau=1 + float(accuracy.cumprod(dim=0).sum()),
        )


def num_accepted(right: Tensor, keep: Tensor) -> Tensor:
    """Length of the right prefix: [..., s], [..., s] -> [...]."""
    return (right & keep).long().cumprod(dim=-1).sum(dim=-1)


class HeldOut:
    """Held-out examples with the target's states of them, computed once.

    At most `limit` examples, taken evenly; `texts_sha256` is their hash.
    """

    def __init__(self, target: FrozenTarget, examples: Sequence[Example], limit: int) -> None:
        stride = max(1, -(-len(examples) // limit))
        chosen = sorted(examples[::stride], key=len)
        self.texts_sha256 = texts_sha256(chosen)
        self._target = target
        self._batches: list[tuple[list[Example], Batch, Tensor]] = []
        for start in range(0, len(chosen), BATCH_SEQUENCES):
            part = chosen[start : start + BATCH_SEQUENCES]
            batch = collate(part, target.embed_weight.device)
            features, _ = target.split(target.states(batch.token_ids, batch.lengths))
            self._batches.append((part, batch, features.clone()))

    @torch.no_grad()
    def evaluate(
        self, drafter: TrainedDrafter, tick: Callable[[], object] = lambda: None
    ) -> HeldOutMetrics:
        """Walk over every example with the drafter as it is; `tick` is called on the way."""
        tally = _Tally()
        for examples, batch, features in self._batches:
            self._walk(drafter, examples, batch, features, tally)
            tick()
        return tally.metrics()

    def _walk(
        self,
        drafter: TrainedDrafter,
        examples: list[Example],
        batch: Batch,
        features: Tensor,
        tally: _Tally,
    ) -> None:
        device = features.device
        embed_weight, head = self._target.embed_weight, self._target.lm_head_weight
        context = drafter.context(features, batch, embed_weight)
        rows = torch.arange(len(examples), device=device)
        anchors = torch.tensor([len(example.prompt_ids) for example in examples], device=device)
        lengths = torch.tensor([len(example) for example in examples], device=device)
        while True:
            rows = rows[anchors[rows] + 1 < lengths[rows]]
            if not len(rows):
                return
            part = batch.rows(rows)
            here = Anchors(anchors[rows, None], torch.ones_like(rows[:, None], dtype=torch.bool))
            blocks = drafter.blocks(part, here)
            own = [tensor[rows] for tensor in context]
            hidden = drafter.filled(own, blocks, here, embed_weight, head)[:, 0]
            logits = drafter.logits(hidden, head).float()
            left = lengths[rows] - 1 - anchors[rows]
            sets = [examples[row].set for row in rows.tolist()]
            guesses = drafter.greedy_guesses(hidden, logits, blocks.token_ids[:, 0])
            anchors[rows] += _count_cycle(logits, guesses, blocks, left, sets, tally)


def _count_cycle(
    logits: Tensor,
    guesses: Tensor,
    blocks: Blocks,
    left: Tensor,
    sets: list[str],
    tally: _Tally,
) -> Tensor:
    """Add one cycle of every row.

    Args:
        logits: [rows, s, V].
        guesses: [rows, s].
        blocks: one of each row.
        left: [rows], tokens of the answer behind the anchor.
        sets: of each row.
        tally: where to add.

    Returns:
        [rows], the tokens that decoding would commit.
    """
    labels, keep = blocks.labels[:, 0], blocks.keep[:, 0]
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    right = guesses == labels
    tally.add_slots(nll, right, keep)
    committed = torch.minimum(num_accepted(right, keep) + 1, left)
    for name, number in zip(sets, committed.tolist(), strict=True):
        tally.tokens[name] += number
        tally.cycles[name] += 1
    return committed
