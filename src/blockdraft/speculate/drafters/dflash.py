"""The block-diffusion drafter at work: one forward fills a block (DFlash, arXiv 2602.06036)."""

from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from blockdraft.core.errors import RequestError
from blockdraft.core.recorder import NO_RECORDER, Recorder, Work
from blockdraft.core.sequence import Batch, DraftBlock, Row
from blockdraft.models.context_projection import ContextProjection
from blockdraft.models.draft import DraftModel
from blockdraft.models.draft_context import ContextSpan, DraftContexts, SeparateContexts
from blockdraft.models.draft_kernels import kernel_draft
from blockdraft.models.draft_masks import block_masks
from blockdraft.models.packed import linear_of, packed_copy, plain_linears
from blockdraft.speculate.choice import NO_CHOICE, argmax_ids, choices
from blockdraft.speculate.drafters.base import Watch

MAX_WAITING = 64
"""Tokens of a sequence whose features may wait. They are projected when it drafts again; one that
does not gets its context in pieces of this size, which is cheap, and can be reused by others."""


@dataclass(slots=True)
class _Context:
    """How much of a sequence's context is written, and the features that wait behind it."""

    num_written: int
    num_waiting: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.num_written + self.num_waiting


class DFlashDrafter:
    """Drafts with a DFlash model that shares the target's embedding and head.

    embed_weight and lm_head_weight: [V, D] of the target, raw. `contexts` hold the draft keys and
    values, one by one unless given. `max_draft_tokens` is the most that the model was trained for;
    it may be set to anything, and the output stays the same; so may `watch`. Packed weights are
    copies of this moment: after `model` was trained, make a new drafter.
    """

    def __init__(
        self,
        model: DraftModel,
        embed_weight: Tensor,
        lm_head_weight: Tensor,
        contexts: DraftContexts | None = None,
    ) -> None:
        self.contexts = contexts or SeparateContexts(model.new_context)
        # In pages, kernels run the layers, from weights that they pack themselves.
        self._kernel_draft = kernel_draft(model) if self.contexts.together else None
        self.model = packed_copy(model, plain_linears if self._kernel_draft is None else _fusion)
        self._project_context = ContextProjection(self.model)
        self.embed_weight = embed_weight
        self.vocabulary_ids: Tensor | None = None
        if model.draft_vocabulary is not None:
            self.vocabulary_ids = torch.tensor(model.draft_vocabulary, device=lm_head_weight.device)
            lm_head_weight = lm_head_weight.detach()[self.vocabulary_ids]
        self._head = linear_of(lm_head_weight)
        self.max_draft_tokens = model.config.block_size - 1
        self.layer_ids = model.config.target_layer_ids
        self.watch: Watch | None = None
        self.recorder: Recorder = NO_RECORDER
        self._known: dict[int, _Context] = {}

    @property
    def num_guessable(self) -> int:
        """Tokens that may be guessed: of the draft vocabulary, or all."""
        ids = self.embed_weight if self.vocabulary_ids is None else self.vocabulary_ids
        return ids.shape[0]

    @torch.inference_mode()
    def prepare(self, batch: Batch) -> None:
        """Project waiting features into the draft layers' keys and values, all in one pass."""
        spans, features = [], []
        for row in batch:
            key = row.sequence.key
            # Seen for the first time: what is cached was taken over, and has its context.
            known = self._known.setdefault(key, _Context(row.sequence.num_cached))
            if not known.waiting:
                continue
            if row.num_draft_tokens or known.num_waiting >= MAX_WAITING:
                spans.append(ContextSpan(key, known.num_written, known.end))
                features += known.waiting
        if self.recorder.measures:
            self._record_prepare(batch, spans)
        if not spans:
            return
        positions = torch.cat([torch.arange(span.start, span.end) for span in spans])
        projected = self._project_context(
            torch.cat(features)[None], positions.to(self.embed_weight.device)[None]
        )
        self.contexts.append(spans, projected)
        for span in spans:
            self._known[span.key] = _Context(span.end)

    def _record_prepare(self, batch: Batch, spans: list[ContextSpan]) -> None:
        """What is held, and what is about to be projected, of prompts and of generated tokens."""
        self.recorder.hold(
            context=sum(known.num_written for known in self._known.values()),
            waiting=sum(known.num_waiting for known in self._known.values()),
        )
        prompts = {row.sequence.key: row.sequence.num_prompt for row in batch}
        num_tokens = sum(span.end - span.start for span in spans)
        num_prompt = sum(max(0, min(span.end, prompts[span.key]) - span.start) for span in spans)
        if num_prompt:
            self.recorder.add("draft_prefill", Work(num_prompt, forwards=num_prompt / num_tokens))
        if num_generated := num_tokens - num_prompt:
            self.recorder.add("inject", Work(num_generated, forwards=num_generated / num_tokens))

    @torch.inference_mode()
    def draft(self, batch: Batch) -> DraftBlock:
        """Guess the target's choices: its choice rule, applied to the drafter's logits.

        So a sampled request is drafted with the very noise that will choose the target's token.
        """
        drafting = [row for row in batch if row.num_draft_tokens]
        parts = [drafting] if self.contexts.together else [[row] for row in drafting]
        guesses = iter([guess for part in parts if part for guess in self._draft_rows(part)])
        return [next(guesses) if row.num_draft_tokens else [] for row in batch]

    def _draft_rows(self, rows: list[Row]) -> list[list[int]]:
        """Guesses of rows that share a forward; all blocks are as long as the longest."""
        device, lengths = self.embed_weight.device, [row.sequence.num_cached for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            # The anchor has no features yet: the context ends right before it.
            assert self.num_written(row.sequence.key) == length == len(row.sequence.token_ids) - 1
        size = 1 + max(row.num_draft_tokens for row in rows)
        masked = [self.model.config.mask_token_id] * (size - 1)
        slots = [[row.sequence.token_ids[-1], *masked] for row in rows]
        positions = [list(range(length, length + size)) for length in lengths]
        ids = torch.tensor([slots, positions], device=device)
        hidden = self._by_kernels(rows, lengths, ids)
        if hidden is None:
            hidden = self._by_torch(rows, lengths, ids)
        if self.recorder.measures:
            self._record_draft(lengths, size)
        return self._guess(hidden[:, 1:], rows)

    def _by_kernels(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor | None:
        """Hidden states [b, slots, D] of token ids and positions [2, b, slots]; None without."""
        if self._kernel_draft is None:
            return None
        sizes = [1 + row.num_draft_tokens for row in rows]
        blocks = self.contexts.blocks([row.sequence.key for row in rows], lengths, sizes)
        if blocks is None:
            return None
        return self._kernel_draft(self.model.embed(ids[0], self.embed_weight), ids[1], blocks)

    def _by_torch(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor:
        """The same, filled up blocks visible."""
        context = self.contexts.view([row.sequence.key for row in rows], lengths)
        size = ids.shape[2]
        if len(rows) == 1:
            masks = self.model.block_masks(lengths[0], size, ids.device)
        else:
            anchors = ids[1, :, :1]
            masks = block_masks(self.model.config, anchors, size, context.num_context)
        hidden: Tensor = self.model(
            self.model.embed(ids[0], self.embed_weight), ids[1], context, masks
        )
        return hidden

    def _record_draft(self, lengths: list[int], size: int) -> None:
        """A forward of blocks of `size` slots behind contexts of these lengths."""
        num = len(lengths)
        pairs = sum(size * (length + size) for length in lengths)
        work = Work(num * size, 0, pairs, sum(lengths), forwards=1, sequences=num)
        self.recorder.add("draft", work)
        num_guesses = num * (size - 1)
        self.recorder.add("draft_head", Work(head_rows=num_guesses, forwards=1))
        self.recorder.add("guess", Work(head_rows=num_guesses))

    def _guess(self, hidden: Tensor, rows: list[Row]) -> list[list[int]]:
        """[b, slots, D] -> the guesses of each row."""
        with self.recorder.phase("draft_head"):
            logits = self._logits(hidden)
        if self.watch is not None:
            self.watch(rows, self._over_whole_vocabulary(logits))
        with self.recorder.phase("guess"):
            return self._chosen(logits, rows)

    def _chosen(self, logits: Tensor, rows: list[Row]) -> list[list[int]]:
        """[b, slots, guessable tokens] -> the guesses of each row."""
        if all(row.sequence.params.is_greedy_argmax for row in rows):
            found = self._greedy(logits.flatten(0, 1))
            size = logits.shape[1]
            return [found[i * size : i * size + row.num_draft_tokens] for i, row in enumerate(rows)]
        whole = self._over_whole_vocabulary(logits)
        return [
            self._choices(own[: row.num_draft_tokens], row)
            for own, row in zip(whole, rows, strict=True)
        ]

    def _logits(self, hidden: Tensor) -> Tensor:
        """[b, slots, D] -> [b, slots, guessable tokens]."""
        return self.model.scaled_logits(self._head(hidden.reshape(-1, hidden.shape[-1]))).view(
            *hidden.shape[:-1], -1
        )

    def _greedy(self, logits: Tensor) -> list[int]:
        """[n, guessable tokens] -> n token ids."""
        places = [max(place, 0) for place in argmax_ids(logits)]
        if self.model.draft_vocabulary is None:
            return places
        return [self.model.draft_vocabulary[place] for place in places]

    def _over_whole_vocabulary(self, logits: Tensor) -> Tensor:
        """[.., guessable tokens] -> [.., V]; tokens that are never guessed have -inf."""
        if self.vocabulary_ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.embed_weight.shape[0]), -torch.inf)
        whole[..., self.vocabulary_ids] = logits
        return whole

    def _choices(self, logits: Tensor, row: Row) -> list[int]:
        guessed: list[int] = []
        # Behind a place where a grammar cannot be followed there is nothing to guess.
        with suppress(RequestError):
            # `guessed` grows while the rows are read, so each guess sees those before it.
            for token_id in choices(logits, row.sequence, guessed):
                # Not even a broken drafter may give the target what is no token.
                guessed.append(0 if token_id == NO_CHOICE else token_id)
        return guessed

    @torch.inference_mode()
    def absorb(self, key: int, start: int, features: Tensor) -> None:
        """Keep features [new, num_features * hidden] until the context is needed."""
        known = self._known.setdefault(key, _Context(start))
        # A step that was interrupted is made again.
        new = features[known.end - start :]
        if new.shape[0]:
            with self.recorder.phase("capture"):
                known.waiting.append(new.clone())
            if self.recorder.measures:
                self.recorder.add("capture", Work(rows=new.shape[0]))
            known.num_waiting += new.shape[0]

    def num_written(self, key: int) -> int:
        """See Drafter.num_written."""
        return self._known[key].num_written if key in self._known else 0

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._known.pop(key, None)
        self.contexts.close(key)


def _fusion(model: DraftModel) -> list[nn.Linear]:
    return [model.fc]
