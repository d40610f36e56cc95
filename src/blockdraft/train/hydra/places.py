"""What a Hydra head learns from: the target's answers, and what the target thought of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.core.progress import Progress
from blockdraft.data.dataset import collate
from blockdraft.data.store import Example, TextStore
from blockdraft.train.features import FeatureCache, FrozenTarget

TEXTS_AT_ONCE = 512
"""Answers that are ordered by length together, so that those of a batch are of like length."""

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of texts, padded, each place a token from the second on: features before it [texts, places, K *
D], the token [texts, places], the final state there [texts, places, D], and the places, of all
texts one behind another, where the head learns the target's choice: from the last token of the
prompt on."""


class Places:
    """The answers as a head reads them.

    Args:
        target: that wrote them; its `layer_ids` are those that the head reads.
        examples: the answers.
        folder: where the target's states are kept; those of other answers are deleted there. None
            has the target read the answers in each step.
        target_sha256: what the target is known by.
        step_tokens: most tokens of the texts of a batch, padding included, if it holds several.
    """

    def __init__(
        self,
        target: FrozenTarget,
        examples: Sequence[Example],
        folder: Path | None,
        target_sha256: str,
        step_tokens: int,
    ) -> None:
        self._examples, self._target, self._step_tokens = examples, target, step_tokens
        self._lengths: list[int] = TextStore.of(examples).lengths.tolist()
        self._cache = FeatureCache(target, examples, folder, target_sha256)

    def __len__(self) -> int:
        return len(self._examples)

    def read(self, shown: Progress) -> Iterator[None]:
        """Have the target read what the folder lacks; yields when a part of it is kept."""
        missing = sorted(self._cache.missing(), key=self._lengths.__getitem__)
        num_read = 0
        for indices in self._alike(missing):
            self._states(indices)
            num_read += len(indices)
            shown.show(f"the target has read {num_read} of {len(missing)} answers")
            yield

    def _alike(self, rising: Sequence[int]) -> list[list[int]]:
        """Texts of rising length, as many together as a step takes."""
        batches: list[list[int]] = []
        for index in rising:
            if not batches or (len(batches[-1]) + 1) * self._lengths[index] > self._step_tokens:
                batches.append([])
            batches[-1].append(index)
        return batches

    def _states(self, indices: Sequence[int]) -> Tensor:
        """[texts, tokens, (K + 1) * D], padded."""
        device = self._target.embed_weight.device
        batch = collate([self._examples[index] for index in indices], device)
        return self._cache.get([[index] for index in indices], batch)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        """Each text once, those of a batch of like length."""
        order = torch.randperm(len(self._examples), generator=generator).tolist()
        for first in range(0, len(order), TEXTS_AT_ONCE):
            some = order[first : first + TEXTS_AT_ONCE]
            alike = self._alike(sorted(some, key=self._lengths.__getitem__))
            for place in torch.randperm(len(alike), generator=generator).tolist():
                yield self._batch(alike[place])

    def _batch(self, indices: Sequence[int]) -> Batch:
        examples, states = [self._examples[index] for index in indices], self._states(indices)
        num_places, size = states.shape[1] - 1, self._target.hidden_size
        tokens = torch.zeros(len(examples), num_places, dtype=torch.long)
        learns = torch.zeros(len(examples), num_places, dtype=torch.bool)
        for row, example in enumerate(examples):
            tokens[row, : len(example) - 1] = torch.tensor(example.token_ids[1:])
            learns[row, len(example.prompt_ids) - 2 : len(example) - 1] = True
        # The places as numbers: with booleans a card would have to say how many there are.
        places = learns.flatten().nonzero()[:, 0].to(states.device)
        tokens = tokens.to(states.device)
        return states[:, :-1, :-size], tokens, states[:, 1:, -size:], places
