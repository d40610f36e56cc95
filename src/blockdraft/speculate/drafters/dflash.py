"""The block-diffusion drafter at work: one forward fills a block (DFlash, arXiv 2602.06036)."""

import torch
from torch import Tensor

from blockdraft.core.sequence import Batch, DraftBlock, Row
from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_context import DraftContext
from blockdraft.speculate.choice import choices


class DFlashDrafter:
    """Drafts with a DFlash model that shares the target's embedding and head.

    embed_weight and lm_head_weight: [V, D] of the target, raw. `max_draft_tokens` is the most
    that the model was trained for; it may be set to anything, and the output stays the same.
    """

    def __init__(self, model: DraftModel, embed_weight: Tensor, lm_head_weight: Tensor) -> None:
        self.model = model
        self.embed_weight = embed_weight
        self.vocabulary_ids: Tensor | None = None
        self.lm_head_weight = lm_head_weight
        if model.draft_vocabulary is not None:
            self.vocabulary_ids = torch.tensor(model.draft_vocabulary, device=lm_head_weight.device)
            self.lm_head_weight = lm_head_weight.detach()[self.vocabulary_ids]
        self.max_draft_tokens = model.config.block_size - 1
        self.layer_ids = model.config.target_layer_ids
        self._contexts: dict[int, DraftContext] = {}

    @torch.inference_mode()
    def draft(self, batch: Batch) -> DraftBlock:
        """Guess the target's choices: its choice rule, applied to the drafter's logits.

        So a sampled request is drafted with the very noise that will choose the target's token.
        """
        return [self._draft_row(row) if row.num_draft_tokens else [] for row in batch]

    def _draft_row(self, row: Row) -> list[int]:
        context = self._contexts[row.sequence.key]
        # The anchor has no features yet: the context ends right before it.
        assert context.num_context == row.sequence.num_cached == len(row.sequence.token_ids) - 1
        device = self.embed_weight.device
        size = 1 + row.num_draft_tokens
        start = context.num_context
        slots = [row.sequence.token_ids[-1]] + [self.model.config.mask_token_id] * (size - 1)
        ids = torch.tensor([slots, range(start, start + size)], device=device)
        hidden = self.model(
            self.model.embed(ids[:1], self.embed_weight),
            ids[1:],
            context,
            self.model.block_masks(start, size, device),
        )
        return self._guess(self._logits(hidden[0, 1:]), row)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[slots, D] -> [slots, V]; tokens that are never guessed have -inf."""
        logits = self.model.logits(hidden, self.lm_head_weight)
        if self.vocabulary_ids is None:
            return logits
        whole = logits.new_full((hidden.shape[0], self.embed_weight.shape[0]), -torch.inf)
        whole[:, self.vocabulary_ids] = logits
        return whole

    def _guess(self, logits: Tensor, row: Row) -> list[int]:
        guessed: list[int] = []
        # `guessed` grows while the rows are read, so each guess sees those before it.
        for token_id in choices(logits, row.sequence, guessed):
            guessed.append(token_id)
        return guessed

    @torch.inference_mode()
    def absorb(self, key: int, features: Tensor | None) -> None:
        """Project features [new, num_features * hidden] into the draft layers' keys and values."""
        assert features is not None
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = self.model.new_context()
        start = context.num_context
        positions = torch.arange(start, start + features.shape[0], device=features.device)
        context.append(self.model.project_context(features[None], positions[None]))

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._contexts.pop(key, None)
