"""The EAGLE-3 drafter at work: one forward of one layer for each depth (arXiv 2503.01840).

The context are pairs of a committed token and the target's feature of the token before it; their
keys and values need no forward, as there is one layer. The first level is the pair of the anchor.
Below it, a node's pair has the drafter's own output in place of the feature. What was drafted is
never kept: once its tokens are committed, there are features for their pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockdraft.core.plan import Proposal
from blockdraft.core.recorder import Work
from blockdraft.core.sequence import Row
from blockdraft.kernels.weights import GroupWeight
from blockdraft.models.draft.context import LayerKV
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.eagle3_kernels import kernel_eagle3
from blockdraft.models.draft.pair_contexts import PairContexts, SeparatePairs, shifted
from blockdraft.models.draft.waiting_features import Waiting, features_and_positions
from blockdraft.models.layers.packed import packed_copy
from blockdraft.speculate.drafters.base import DraftCost, Watch
from blockdraft.speculate.drafters.lazy_context import LazyContext
from blockdraft.speculate.drafters.levels import DEPTH, Child, LevelGrower
from blockdraft.speculate.drafters.slots import Guessable

WIDTH = 10
"""Nodes of a level that are expanded, as in the paper."""


class Eagle3Drafter(LazyContext):
    """Drafts with an EAGLE-3 model.

    `max_nodes` and `watch` may be set; neither changes any output. Packed weights are copies of
    this moment: after `model` was trained, make a new drafter.

    embed_weight: [V, D] of the target, raw or in groups; a model that has its own uses that.
    feature_layers: 0-based, of the target. contexts: hold the pairs; unless given, in memory of
    each sequence's own. in_int8: multiply with the closest weights in int8.
    """

    kind = "eagle3"
    cost: DraftCost = "level"
    model: Eagle3Model
    contexts: PairContexts

    def __init__(
        self,
        model: Eagle3Model,
        embed_weight: Tensor | GroupWeight,
        feature_layers: Sequence[int],
        contexts: PairContexts | None = None,
        *,
        in_int8: bool = False,
    ) -> None:
        super().__init__()
        self.contexts = contexts or SeparatePairs(model.new_context)
        self.model = model
        kernels = kernel_eagle3(model, in_int8=in_int8)
        self.runs = packed_copy(model, in_int8=in_int8) if kernels is None else kernels
        self.embed_weight = embed_weight if model.own_embedding is None else model.own_embedding
        self.vocabulary_ids: Tensor | None = None
        if model.draft_vocabulary is not None:
            self.vocabulary_ids = torch.tensor(model.draft_vocabulary, device=self._device)
        self._guessable = Guessable(model.config.vocab_size, self.vocabulary_ids)
        self.feature_layers = tuple(feature_layers)
        self.max_nodes = DEPTH
        self.watch: Watch | None = None

    @property
    def _device(self) -> torch.device:
        return self.model.fc.weight.device

    @property
    def num_guessable(self) -> int:
        """Tokens that may be guessed: of the draft vocabulary."""
        return self.model.config.draft_vocab_size

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open."""
        super().open(row, num_reused)
        self.contexts.begin(row.sequence.key, num_reused)

    @torch.inference_mode()
    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed. Pairs wait until someone drafts behind them."""
        if features is None:
            return
        with self._capturing():
            sequence = row.sequence
            self.contexts.keep_pairs(sequence.key, sequence.num_cached, token_ids, features)
        self._extend(row, len(token_ids))

    def _project(self, piece: list[Waiting]) -> list[LayerKV]:
        features, positions = features_and_positions(piece)
        token_ids = [i for waiting in piece for i in self.contexts.token_ids(waiting)]
        return [self._keys_values(token_ids, features[None], positions)]

    def fresh_context(self, token_ids: Sequence[int], features: Tensor | None) -> list[LayerKV]:
        """See LazyContext. No pair stands at position 0, and nobody looks there."""
        assert features is not None
        before = shifted(None, features)[None]
        return [self._keys_values(token_ids, before, range(len(token_ids)))]

    def _keys_values(
        self, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> LayerKV:
        """Of pairs: tokens at positions, and features [1, t, ..] of the tokens before them."""
        ids, places = torch.tensor([[*token_ids], [*positions]], device=self._device)[:, None]
        embeddings = self.model.embed(ids, self.embed_weight)
        return self.runs.keys_values(embeddings, self.runs.fuse(features), places)

    def _draft_rows(self, rows: list[Row]) -> list[Proposal]:
        """See LazyContext: chains of the drafter's choices, or the best of dynamic trees."""
        for row in rows:
            # The anchor has no feature yet: the context ends right before its pair.
            assert self.num_written(row.sequence.key) == row.sequence.num_cached
        grower = LevelGrower(rows, self._guessable, WIDTH, self.watch)
        forwards = _Forwards(self, rows)
        with self.recorder.phase("guess"):
            grower.grow(forwards.first(), forwards.advance)
        return [tree.proposal(self.kind) for tree in grower.trees]


class _Forwards:
    """The forwards of one proposal: the context of its rows, and the levels below the anchors.

    The context is gathered once; each level is written behind it, for those that follow.
    """

    def __init__(self, drafter: Eagle3Drafter, rows: list[Row]) -> None:
        self._drafter, self._rows = drafter, rows
        self._device = drafter.model.fc.weight.device
        self._lengths = [row.sequence.num_cached for row in rows]
        num_levels = max(row.num_slots for row in rows)
        config, num = drafter.model.config, len(rows)
        room = drafter.model.fc.weight.new_zeros(
            num, config.num_key_value_heads, 1 + (num_levels - 1) * WIDTH, config.head_dim
        )
        keys = [row.sequence.key for row in rows]
        context = drafter.contexts.view(keys, self._lengths)
        self._keys, self._values = context.extend(0, room, room)
        self.num_context = context.num_context
        self._num_used = self.num_context
        places = torch.arange(self.num_context, device=self._device)
        known = map(drafter.contexts.positions, keys, self._lengths)
        lengths = torch.tensor([[len(own)] for own in known], device=self._device)
        # Position 0 holds no pair; behind a context are those of others.
        self._sees = ((places > 0) & (places < lengths))[:, None]
        self._hidden = torch.empty(0)
        self._depth = 0

    def first(self) -> Tensor:
        """Logits [b, 1, n] behind the anchors."""
        drafter = self._drafter
        last = [drafter.contexts.last_feature(row.sequence.key) for row in self._rows]
        hidden = drafter.runs.fuse(torch.stack(last)[:, None])
        anchors = [[row.sequence.token_ids[-1]] for row in self._rows]
        return self._run(anchors, hidden)

    def advance(self, levels: list[list[Child]]) -> Tensor:
        """See levels.Advance. Shorter levels are filled up, with nodes that nobody looks at."""
        width = max(map(len, levels))
        filled = [[*own, *[Child(0, 0)] * (width - len(own))] for own in levels]
        parents = torch.tensor([[c.parent for c in own] for own in filled], device=self._device)
        above = self._sees.expand(-1, self._hidden.shape[1], -1)
        self._sees = above.gather(1, parents[..., None].expand(-1, -1, above.shape[2]))
        size = self._hidden.shape[2]
        hidden = self._hidden.gather(1, parents[..., None].expand(-1, -1, size))
        return self._run([[c.token_id for c in own] for own in filled], hidden)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> LayerKV:
        """See ContextKV.extend: behind the levels before."""
        start, self._num_used = self._num_used, self._num_used + k.shape[2]
        self._keys[:, :, start : self._num_used] = k
        self._values[:, :, start : self._num_used] = v
        return self._keys[:, :, : self._num_used], self._values[:, :, : self._num_used]

    def _run(self, token_ids: list[list[int]], hidden: Tensor) -> Tensor:
        """A level of tokens [b, w] with the hidden states [b, w, D] of the level before."""
        drafter, model = self._drafter, self._drafter.model
        num, width = hidden.shape[:2]
        own = torch.eye(width, dtype=torch.bool, device=self._device).expand(num, -1, -1)
        self._sees = torch.cat((self._sees.expand(-1, width, -1), own), dim=2)
        positions = torch.tensor(self._lengths, device=self._device)[:, None] + self._depth
        self._depth += 1
        with drafter.recorder.phase("draft"):
            ids = torch.tensor(token_ids, device=self._device)
            self._hidden = drafter.runs(
                model.embed(ids, drafter.embed_weight),
                hidden,
                positions.expand(-1, width),
                self,
                self._sees[:, None],
            )
        with drafter.recorder.phase("draft_head"):
            logits = drafter.runs.logits(self._hidden)
        if drafter.recorder.measures:
            self._record(num * width)
        return logits

    def _record(self, num_nodes: int) -> None:
        num_keys = sum(self._lengths)
        pairs = num_nodes * self._num_used
        recorder = self._drafter.recorder
        work = Work(num_nodes, 0, pairs, num_keys, forwards=1, sequences=len(self._rows))
        recorder.add("draft", work)
        recorder.add("draft_head", Work(head_rows=num_nodes, forwards=1))
        recorder.add("guess", Work(head_rows=num_nodes))
