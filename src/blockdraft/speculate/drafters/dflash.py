"""The block-diffusion drafter at work: one forward fills a block (DFlash, arXiv 2602.06036)."""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor, nn

from blockdraft.core.errors import RequestError
from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.recorder import Work
from blockdraft.core.sequence import Row
from blockdraft.kernels.backends import widened
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.context import DraftContexts, LayerKV, SeparateContexts
from blockdraft.models.draft.context_projection import ContextProjection
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.kernels import kernel_draft
from blockdraft.models.draft.masks import block_masks
from blockdraft.models.draft.paged_context import PagedContexts
from blockdraft.models.draft.waiting_features import Waiting, features_and_positions
from blockdraft.models.layers.graphs import Graphs
from blockdraft.models.layers.packed import linear_of, packed_copy, plain_linears, rows_of
from blockdraft.speculate.drafters.base import DraftCost, Watch
from blockdraft.speculate.drafters.branches import Marginals, Slot, Successors, best_first
from blockdraft.speculate.drafters.lazy_context import LazyContext
from blockdraft.speculate.drafters.slots import (
    Guessable,
    SlotCandidates,
    candidates_of_all,
    chosen_slots,
    slots_of,
)
from blockdraft.speculate.sampler.choose import choose_processed
from blockdraft.speculate.sampler.logits import Place, Scores
from blockdraft.speculate.sampler.reference import NO_CHOICE


class DFlashDrafter(LazyContext):
    """Drafts with a DFlash model that shares the target's embedding and head.

    `max_nodes`, at first what the model was trained for, and `watch` may be set; neither changes
    any output. Packed weights are copies of this moment: after `model` was trained, make a new
    drafter.

    embed_weight and lm_head_weight: [V, D] of the target, raw or in groups; a model that has its
    own uses those. contexts: hold the draft keys and values; unless given, in memory of each
    sequence's own. in_int8: multiply with the closest weights in int8.
    """

    cost: DraftCost = "block"
    model: DraftModel

    def __init__(
        self,
        model: DraftModel,
        embed_weight: Tensor | GroupWeight,
        lm_head_weight: Tensor | GroupWeight,
        contexts: DraftContexts | None = None,
        *,
        in_int8: bool = False,
    ) -> None:
        super().__init__()
        self.kind: str = model.config.kind
        self.contexts = contexts or SeparateContexts(model.new_context)
        # In pages, kernels run the layers, from weights that they pack themselves.
        self._kernel_draft = None
        if isinstance(self.contexts, PagedContexts):
            self._kernel_draft = kernel_draft(model, self.contexts, in_int8=in_int8)
            if self._kernel_draft is not None and embed_weight.device.type == "cuda":
                self._kernel_draft.use_static_shapes()
        linears = plain_linears if self._kernel_draft is None else _fusion
        self.model = packed_copy(model, linears, in_int8=in_int8)
        self.project_context = ContextProjection(self.model, in_int8=in_int8)
        self.embed_weight = embed_weight if model.own_embedding is None else model.own_embedding
        head_weight = lm_head_weight if model.own_head is None else model.own_head
        self.vocabulary_ids: Tensor | None = None
        if model.draft_vocabulary is not None:
            self.vocabulary_ids = torch.tensor(
                model.draft_vocabulary, device=self.embed_weight.device
            )
            if model.own_head is None:
                head_weight = rows_of(head_weight, self.vocabulary_ids)
        self.guessable = Guessable(self.embed_weight.shape[0], self.vocabulary_ids)
        self._head = linear_of(head_weight, in_int8=in_int8)
        self.max_nodes = model.config.num_drafted
        self.feature_layers = model.config.target_layer_ids
        self.watch: Watch | None = None

    @property
    def num_guessable(self) -> int:
        """Tokens that may be guessed: of the draft vocabulary, or all."""
        ids = self.embed_weight if self.vocabulary_ids is None else self.vocabulary_ids
        return ids.shape[0]

    @property
    def graphs(self) -> Graphs[Tensor] | None:
        """Of its forwards on a card; None if their shapes are not fixed."""
        return None if self._kernel_draft is None else self._kernel_draft.graphs

    def _write(self, piece: list[Waiting]) -> None:
        """See LazyContext. Pages take the keys and values of all layers in one call."""
        if not isinstance(self.contexts, PagedContexts):
            super()._write(piece)
            return
        projected, rotation = self.project_context.projected(*self._inputs(piece))
        cos, signed_sin = (part[0] for part in rotation)
        key_norms = self.project_context.key_norms
        self.contexts.write_projected(piece, projected, key_norms, (cos, signed_sin))

    def _project(self, piece: list[Waiting]) -> list[LayerKV]:
        """See LazyContext."""
        return self.project_context(*self._inputs(piece))

    def _inputs(self, piece: list[Waiting]) -> tuple[Tensor, Tensor]:
        """The features [1, c, ..] that wait and their positions [1, c]."""
        features, positions = features_and_positions(piece)
        return features[None], torch.tensor([positions], device=self.embed_weight.device)

    def _draft_rows(self, rows: list[Row]) -> list[Proposal]:
        """See LazyContext: a chain each, of the target's choices as the drafter sees them.

        The choice rule is applied to the drafter's logits, so a sampled request is drafted with the
        very noise that will choose the target's token. A row that may have more nodes than slots
        gets branches too. All blocks are as long as the longest.
        """
        device, lengths = self.embed_weight.device, [row.sequence.num_cached for row in rows]
        for row, length in zip(rows, lengths, strict=True):
            # The anchor has no features yet: the context ends right before it.
            assert self.num_written(row.sequence.key) == length == len(row.sequence.token_ids) - 1
        first = self.model.config.first_slot
        size = first + max(row.num_slots for row in rows)
        masked = [self.model.config.mask_token_id] * (size - 1)
        slots = [[row.sequence.token_ids[-1], *masked] for row in rows]
        positions = [list(range(length, length + size)) for length in lengths]
        ids = torch.tensor([slots, positions], device=device)
        return self._guess(self._hidden(rows, lengths, ids)[:, first:], rows)

    def _hidden(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor:
        """Hidden states [b, slots, D] of token ids and positions [2, b, slots]."""
        run = self._by_torch if self._kernel_draft is None else self._by_kernels
        hidden = run(rows, lengths, ids)
        if self.recorder.measures:
            self._record_draft(lengths, ids.shape[2])
        return hidden

    def _by_kernels(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor:
        """See `_hidden`."""
        assert self._kernel_draft is not None
        keys = [row.sequence.key for row in rows]
        sizes = [self.model.config.first_slot + row.num_slots for row in rows]
        embeddings = self.model.embed(ids[0], self.embed_weight)
        return self._kernel_draft(embeddings, ids[1], keys, lengths, sizes)

    def _by_torch(self, rows: list[Row], lengths: list[int], ids: Tensor) -> Tensor:
        """The same in torch. A shorter block is filled up with masks, which it sees."""
        keys = [row.sequence.key for row in rows]
        context = self.contexts.view(keys, lengths)
        size = ids.shape[2]
        if len(rows) == 1:
            masks = self.model.block_masks(context.num_context, size, ids.device)
        else:
            known = map(self.contexts.positions, keys, lengths)
            anchors = torch.tensor([[len(own)] for own in known], device=ids.device)
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
        num_guesses = num * (size - self.model.config.first_slot)
        self.recorder.add("draft_head", Work(head_rows=num_guesses, forwards=1))
        self.recorder.add("guess", Work(head_rows=num_guesses))

    def _guess(self, hidden: Tensor, rows: list[Row]) -> list[Proposal]:
        """[b, slots, D] -> the proposal of each row."""
        with self.recorder.phase("draft_head"):
            logits = self._logits(hidden)
        return self._proposals(hidden, logits, rows)

    def _proposals(self, hidden: Tensor, logits: Tensor, rows: list[Row]) -> list[Proposal]:
        """From hidden states [b, slots, D] and logits [b, slots, guessable tokens]."""
        if self.watch is not None:
            self.watch(rows, self.guessable.over_whole_vocabulary(logits))
        with self.recorder.phase("guess"):
            known = self._candidates(logits, rows)
            return [
                self._proposal(row, Marginals(self._slots(own, row, candidates)))
                for own, row, candidates in zip(logits, rows, known, strict=True)
            ]

    def _candidates(self, logits: Tensor, rows: list[Row]) -> list[SlotCandidates | None]:
        """Of each row that chooses from the logits as they are; None for others."""
        are_plain = [not row.sequence.params.changes_logits for row in rows]
        wanted = [
            own[: row.num_slots]
            for own, row, is_plain in zip(logits, rows, are_plain, strict=True)
            if is_plain
        ]
        found = iter(candidates_of_all(wanted, self.guessable))
        return [next(found) if is_plain else None for is_plain in are_plain]

    def _proposal(self, row: Row, successors: Successors) -> Proposal:
        """The drafter's chain with its probabilities, and branches if there is room."""
        if not successors.max_depth:
            return NOTHING
        tree, probabilities = best_first(successors, row.num_draft_tokens)
        return Proposal(tree, probabilities, (self.kind,) * len(tree))

    def _slots(self, logits: Tensor, row: Row, known: SlotCandidates | None = None) -> list[Slot]:
        """What is thought of a row's slots, from logits [slots, guessable tokens].

        known: see `chosen_slots`.
        """
        if row.sequence.params.changes_logits:
            return self._changed_slots(logits, row)
        return chosen_slots(logits[: row.num_slots], row.sequence, self.guessable, known)

    def _changed_slots(self, logits: Tensor, row: Row) -> list[Slot]:
        """The slots of a chain that is chosen first, from logits [slots, guessable tokens].

        Without room for branches, penalties and grammars are left out of the probabilities: a
        vocabulary takes long to look through, and the chain has been chosen with them.
        """
        chain, changed = self._chain(logits, row)
        if not chain:
            return []
        if len(chain) == row.num_draft_tokens:
            return slots_of(logits, chain, row.sequence, self.guessable)
        whole = Guessable(self.guessable.vocab_size)
        return slots_of(torch.from_numpy(np.stack(changed)), chain, row.sequence, whole)

    def _chain(self, logits: Tensor, row: Row) -> tuple[list[int], list[Scores]]:
        """The guesses of a row, from logits [slots, guessable tokens], and what each was made from.

        That is [V], as the request leaves it.
        """
        # The list grows while the choices are made, so each guess sees those before it.
        guesses: list[int] = []
        changed: list[Scores] = []
        # One wait for another device, not one for each row.
        whole = self.guessable.over_whole_vocabulary(logits[: row.num_slots]).cpu()
        # Behind a place where a grammar cannot be followed there is nothing to guess.
        with suppress(RequestError):
            for index, own in enumerate(whole):
                place = Place(row.sequence, index, guesses)
                token_id, scores = choose_processed(widened(own), place)
                # Not even a broken drafter may give the target what is no token.
                guesses.append(0 if token_id == NO_CHOICE else token_id)
                changed.append(scores)
        return guesses, changed

    def _logits(self, hidden: Tensor) -> Tensor:
        """[b, slots, D] -> [b, slots, guessable tokens]."""
        return self.model.scaled_logits(self._head(hidden.reshape(-1, hidden.shape[-1]))).view(
            *hidden.shape[:-1], -1
        )

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed. Features wait until someone drafts behind them."""
        if features is not None:
            self._keep(row, features)

    def fresh_context(self, token_ids: Sequence[int], features: Tensor | None) -> list[LayerKV]:
        """See LazyContext."""
        context = self.context_features(token_ids, features)
        positions = torch.arange(len(token_ids), device=context.device)
        found: list[LayerKV] = self.project_context(context[None], positions[None])
        return found

    def context_features(self, token_ids: Sequence[int], features: Tensor | None) -> Tensor:
        """What `project_context` reads of tokens whose features [tokens, ..] are these."""
        assert features is not None
        return features


def _fusion(model: DraftModel) -> list[nn.Linear]:
    """What kernels leave to the model. What a path head adds for each token is packed apart."""
    found = [] if model.config.dflare else [model.fc]
    if model.candidate_selector is not None:
        found.append(model.candidate_selector.hidden_projection)
    if model.markov_head is not None:
        found += filter(None, (model.markov_head.gate_proj, model.markov_head.joint_proj))
    if model.embed_proj is not None:
        found += plain_linears(model.embed_proj[:1])
    if model.hidden_correction is not None:
        found += plain_linears(model.hidden_correction)
    return found
