"""Block diffusion without features of the target: the rival that DFlash is measured against.

The context is the tokens themselves: their embeddings take the place of the target's features, and
all else is DFlash. So nothing waits to be projected, and what the prefix cache holds may come from
anyone: keys and values of the tokens that a sequence took over are made anew. A block is filled in
one forward or in several (`models.draft.denoising`).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from blockdraft.core.sequence import Row
from blockdraft.models.draft.denoising import denoise
from blockdraft.models.draft.waiting_features import Waiting
from blockdraft.speculate.drafters.dflash import DFlashDrafter


class DiffusionDrafter(DFlashDrafter):
    """Drafts with a model whose config says `reads_tokens`; see DFlashDrafter."""

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. Tokens that are reused may have no keys of this drafter."""
        super().open(row, 0)

    def lag(self, row: Row) -> int:
        """See Drafter.lag."""
        return row.sequence.num_cached - self.num_written(row.sequence.key)

    def context_features(self, token_ids: Sequence[int], features: Tensor | None) -> Tensor:
        """See DFlashDrafter.context_features: the embeddings."""
        ids = torch.tensor([token_ids], device=self.embed_weight.device)
        return self.model.embed(ids, self.embed_weight)[0]

    def _needed(self, rows: Sequence[Row]) -> tuple[list[Waiting], int]:
        needed: dict[int, Waiting] = {}
        num_prompt = 0
        for row in rows:
            sequence, known = row.sequence, self._known[row.sequence.key]
            start, known.end = known.num_written, sequence.num_cached
            if start == known.end:
                continue
            features = self.context_features(sequence.token_ids[start : known.end], None)
            for part in self.contexts.parts(sequence.key, start, features):
                # Sequences that share a page need it once, from the first token that one lacks.
                if part.holder not in needed or part.start < needed[part.holder].start:
                    needed[part.holder] = part
                    num_prompt += max(0, min(part.end, sequence.num_prompt) - part.start)
        return list(needed.values()), min(num_prompt, sum(map(len, needed.values())))

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed. The sequence itself has what is needed."""

    def _hidden(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor:
        token_ids, positions = ids

        def forward(token_ids: Tensor) -> Tensor:
            return DFlashDrafter._hidden(self, rows, lengths, torch.stack((token_ids, positions)))

        num_steps = min(self.model.config.num_denoising_steps, token_ids.shape[1] - 1)
        return denoise(token_ids, forward, partial(self._fixable, rows), num_steps)

    def _fixable(self, rows: list[Row], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See denoising.Guess: the choices, and how likely the target makes the same."""
        logits = self._logits(hidden)
        guesses = hidden.new_zeros(logits.shape[:2], dtype=torch.long)
        certainty = logits.new_full(logits.shape[:2], -torch.inf)
        for index, row in enumerate(rows):
            slots = self._slots(logits[index], row)
            chain = [slot.token_ids[0] for slot in slots]
            shares = [slot.probabilities[0] for slot in slots]
            guesses[index, : len(chain)] = guesses.new_tensor(chain)
            certainty[index, : len(chain)] = certainty.new_tensor(shares)
        return guesses, certainty
