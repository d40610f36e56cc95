"""Drafts from n-grams: what usually follows the last few tokens, in the target's answers and here.

No model runs. A table knows the target's answers to others; what followed in the sequence's own
text corrects it (`own_text.py`). The most probable paths are found best first, as from a block
(`branches.py`): their probability is the product along the path. For a sampled request the noise
decides that will choose the target's token, as far as it is known which tokens can win.

A Hydra head (`models.draft.hydra_head`) may guess beside the table. It is a model, but so small
that it is asked in every step of few rows, from the target's hidden states before the newest
token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.core.plan import NOTHING, Proposal, Tree
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.kernels.hydra_interface import HydraLayers
from blockdraft.kernels.ngram_interface import READ_DTYPES, NGramPaths, NGramQuery, TokenNoise
from blockdraft.models.draft.waiting_features import held_alone
from blockdraft.speculate.drafters.base import ModelFree
from blockdraft.speculate.drafters.guesses import DEPTH
from blockdraft.speculate.drafters.ngram_search import ngram_search
from blockdraft.speculate.drafters.ngram_table import NGramTable
from blockdraft.speculate.drafters.slots import noise_temperature
from blockdraft.speculate.sampler.filters import filters
from blockdraft.speculate.sampler.logits import Place
from blockdraft.speculate.sampler.noise import large_noise

MAX_NODES = 8
"""The most nodes of a proposal."""
MOST_WAITING = 16
"""Features come in parts, one a step. So many wait for a search of a text; older ones are dropped.
"""
FEW_ROWS, GUESSED_ROWS = 2, 8
"""With few rows a Hydra head guesses as far as it was trained for, with more one token ahead, with
more than GUESSED_ROWS nothing: candidates are worth less there, and the head takes longer
(docs/experiments/hydra-head.md#how-far-with-several-requests)."""


class NGramDrafter(ModelFree):
    """Proposes trees of the most probable paths; nothing where nothing is likely."""

    kind = "ngram"
    max_nodes = MAX_NODES

    def __init__(
        self, table: NGramTable, vocab_size: int, layers: HydraLayers | None = None
    ) -> None:
        """vocab_size: of the target. layers: of a Hydra head, if there is one."""
        self._search = ngram_search(table, layers)
        self._vocab_size = vocab_size
        self._waiting: dict[int, list[Tensor]] = {}
        """Features that no search has read yet, by sequence."""
        self._open: set[int] = set()
        """Keys of the sequences that run, of those that it may draft for."""
        self._proposed: set[int] = set()
        """Keys that were asked for in this step, until their tokens are committed; few, or none."""
        self._guess_depth = 0
        """Tokens ahead that it guessed in this step; 0 if it was not asked."""
        self._next: list[NGramQuery] = []
        """What of them is likely to be asked in the next step."""
        self.feature_layers = () if layers is None else layers.feature_layers
        self._window = 1 if layers is None else layers.window

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open."""
        if row.sequence.allows(self.kind):
            self._open.add(row.sequence.key)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """See Drafter.propose: all rows in one search."""
        depth = self._guess_depth = _depth_with(len(rows))
        self._proposed = {row.sequence.key for row in rows if depth}
        self._next = []
        found = self._search.paths([self._query(row, row.num_slots, depth) for row in rows])
        if depth:
            for row in rows:
                self._waiting.pop(row.sequence.key, None)  # they are read now
        return [self._proposal(own) for own in found]

    def _query(self, row: Row, max_depth: int, guess_depth: int) -> NGramQuery:
        sample = row.sequence
        waiting = self._waiting.get(sample.key) if guess_depth else None
        return NGramQuery(
            sample.key,
            sample.token_ids,
            self._noise(sample),
            row.num_draft_tokens,
            max_depth,
            None if waiting is None else self._joined(waiting),
            guess_depth,
        )

    def _proposal(self, found: NGramPaths) -> Proposal:
        if not found.tokens:
            return NOTHING
        tree = Tree(found.tokens, found.parents)
        return Proposal(tree, found.probabilities, (self.kind,) * len(found.tokens))

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed.

        The last token with features stands one before the end of the text when that is searched.
        """
        sample = row.sequence
        self._keep(sample.key, features)
        # A row that was not proposed for in this step may not be in the next one either.
        if sample.key not in self._proposed:
            return
        self._proposed.discard(sample.key)
        # The last token of an answer is no draft's.
        num_left = sample.params.max_tokens - sample.num_output - 1
        if sample.finish_reason is None and num_left > 0:
            own = row.within(self.max_nodes)
            depth = min(own.num_slots, num_left)
            self._next.append(self._query(own, depth, self._guess_depth))
        if not self._proposed:
            self._search.search_ahead(self._next)

    def _keep(self, key: int, features: Tensor | None) -> None:
        """Features [rows, values] of committed tokens wait for the next search."""
        # The head is not asked in a large batch. It reads on when few sequences are left.
        is_large_batch = len(self._open) > GUESSED_ROWS
        if not self.feature_layers or features is None or is_large_batch:
            self._waiting.pop(key, None)
            return
        waiting = self._waiting.setdefault(key, [])
        waiting.append(_readable(features[-self._window :]))
        # Nothing reads them in steps that do not propose without a model.
        del waiting[:-MOST_WAITING]

    def close(self, key: int) -> None:
        """See Drafter.close."""
        self._open.discard(key)
        self._search.close(key)
        self._waiting.pop(key, None)

    def _joined(self, waiting: list[Tensor]) -> Tensor:
        """Features [rows, values] of the last tokens, as many as a head looks back at."""
        return waiting[0] if len(waiting) == 1 else torch.cat(waiting)[-self._window :]

    def _noise(self, sample: Sample) -> TokenNoise | None:
        """The noise behind a sample's last token; None where noise decides nothing."""
        temperature = noise_temperature(sample.params)
        if temperature == 0.0:
            return None
        stream = Place(sample, 0, []).stream
        large = None
        # Filters leave few tokens that only their noise makes likely. Without filters, the large
        # noise of this place is no extra work: the target's choice here asks for the same. That of
        # places further on would cost more than it gains.
        if not filters(sample.params):
            found = large_noise(stream, self._vocab_size)
            large = found.ids, found.noise
        return TokenNoise(stream.seed, stream.sample_index, stream.position, temperature, large)


def _depth_with(num_rows: int) -> int:
    """Tokens ahead that a head guesses where so many rows are searched."""
    if num_rows > GUESSED_ROWS:
        return 0
    return DEPTH if num_rows <= FEW_ROWS else 1


def _readable(features: Tensor) -> Tensor:
    """Features in a type that searches read; no view of those of a large step."""
    return held_alone(features if features.dtype in READ_DTYPES else features.float())
