"""The batches of a run, in an order that its settings and texts alone decide."""

from typing import Any

import torch

from blockdraft.data.dataset import Row, collate_rows, epoch_batches
from blockdraft.data.store import TextStore
from blockdraft.train.blocks import sample_anchors
from blockdraft.train.config import TrainConfig
from blockdraft.train.kinds.base import TrainedDrafter
from blockdraft.train.loss import PartialVocabulary
from blockdraft.train.step import Part


class Batches:
    """Pass after pass over the texts; what is drawn at random comes from one generator.

    epoch: of the next batch. num_sequences, num_tokens: drawn so far.
    """

    def __init__(self, examples: TextStore, config: TrainConfig) -> None:
        self.epoch = self.num_sequences = self.num_tokens = 0
        self._examples, self._config = examples, config
        self._lengths: list[int] = examples.lengths.tolist()
        self._generator = torch.Generator().manual_seed(config.seed)
        self._next = 0
        self._order: tuple[int, list[list[Row]]] | None = None

    def draw(self, drafter: TrainedDrafter, vocabulary: PartialVocabulary) -> Part:
        """The next batch, its anchors and its vocabulary."""
        config = self._config
        if self._order is None or self._order[0] != self.epoch:
            batches = epoch_batches(
                self._examples, config.batch_sequences, config.seed, self.epoch, config.pack_len
            )
            self._order = (self.epoch, batches)
        rows = self._order[1][self._next]
        self._next += 1
        if self._next == len(self._order[1]):
            self.begin_pass()
        batch = collate_rows(
            [[self._examples[i] for i in row] for row in rows], config.device, config.pack_len
        )
        self.num_sequences += sum(map(len, rows))
        self.num_tokens += sum(self._lengths[i] for row in rows for i in row)
        anchors = sample_anchors(batch, config.num_anchors, self._generator)
        anchors = drafter.draw(anchors, self._generator)
        return Part(rows, batch, anchors, vocabulary.draw(batch.token_ids, self._generator))

    def begin_pass(self) -> None:
        """Leave what is left of this pass out."""
        self.epoch, self._next = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes up."""
        return {
            "generator": self._generator.get_state(),
            "epoch": self.epoch,
            "next_batch": self._next,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batches that another run has drawn from the same texts."""
        self._generator.set_state(state["generator"])
        self.epoch, self._next = int(state["epoch"]), int(state["next_batch"])
        self.num_sequences, self.num_tokens = int(state["num_sequences"]), int(state["num_tokens"])
