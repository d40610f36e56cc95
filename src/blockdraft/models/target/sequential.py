"""Any transformers causal LM as a target, one sequence after another.

The path that every faster one is held against.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockdraft.cache.kv import KVCache, SlotKV
from blockdraft.cache.memory import Memory
from blockdraft.cache.states import StateCache
from blockdraft.core.plan import ForwardPlan, PlannedRow
from blockdraft.models.attention.exact import EXACT_ATTENTION, STOCK_ATTENTION
from blockdraft.models.layers.recurrent import cache_argument, is_recurrent, new_cache
from blockdraft.models.layers.tensors import joined
from blockdraft.models.target.exact import NUM_COPIED, TAIL_SPLIT, Split
from blockdraft.models.target.interface import RowFeatures, TargetOutput
from blockdraft.models.target.transformers import TransformersTarget, filled


class SequentialTarget(TransformersTarget):
    """One cache per sequence, one forward per row or path. See TransformersTarget.

    A model with recurrent layers takes chains only.
    """

    def __init__(
        self, model: PreTrainedModel, *, layer_ids: Sequence[int] = (), exact: bool = True
    ) -> None:
        attention = EXACT_ATTENTION if exact else STOCK_ATTENTION
        super().__init__(model, attention, layer_ids=layer_ids, exact=exact)
        self._cache_argument = cache_argument(model)
        self.takes_trees = not is_recurrent(model)
        self.memory = Memory()
        self._caches: dict[int, KVCache] = {}
        self._node_kv: dict[int, dict[int, SlotKV]] = {}
        """Of the trees of the last forward, until commit says which path stays."""
        self._num_forwards = 0

    @torch.inference_mode()
    def forward(self, plan: ForwardPlan) -> TargetOutput:
        """See Target.forward. Sequences new to the target get a cache."""
        self._num_forwards = 0
        outputs = [self._forward_row(planned) for planned in plan]
        return TargetOutput(
            joined([o[0] for o in outputs]),
            [o[1] for o in outputs],
            num_forwards=self._num_forwards,
        )

    def _forward_row(self, planned: PlannedRow) -> tuple[Tensor, RowFeatures | None]:
        sequence = planned.row.sequence
        cache = self._caches.get(sequence.key)
        if cache is None:
            cache = self._caches[sequence.key] = new_cache(self.model)
        assert cache.length == sequence.num_cached
        cache.may_return(sequence.num_cached + len(planned.row.new_ids))
        long_from = self._rotation.long_from
        self._rotation.is_long = long_from is not None and sequence.longest > long_from
        if not planned.tree.is_chain:
            return self._run_paths(cache, planned)
        logits, features = self._run(
            cache, planned.token_ids, planned.num_logits, with_features=sequence.may_draft
        )
        return logits, None if features is None else RowFeatures(features)

    def _run_paths(self, cache: KVCache, planned: PlannedRow) -> tuple[Tensor, RowFeatures | None]:
        """The paths of a tree one after another, as plain decoding would run each of them.

        A node that several leaves share is computed once, and its keys and values are copied to
        where it stands in every path.
        """
        row, tree = planned.row, planned.tree
        num_new, base = len(row.new_ids), cache.length + len(row.new_ids)
        done = self._node_kv[row.sequence.key] = {}
        logits, features, order = [], [], list(range(num_new))
        for leaf in tree.leaves:
            path = tree.path(leaf)
            shared = [node for node in path if node in done]
            fresh = path[len(shared) :]
            token_ids = [tree.tokens[node] for node in fresh]
            num_logits = len(fresh)
            if not done:
                token_ids = row.new_ids + token_ids
                num_logits = planned.num_logits - len(tree) + len(fresh)
            else:
                cache.truncate(base)
                for node in shared:
                    cache.append(done[node])
            own, own_features = self._run(
                cache, token_ids, num_logits, with_features=row.sequence.may_draft
            )
            logits.append(own)
            features += [] if own_features is None else [own_features]
            for node in fresh:
                done[node] = cache.copied(base + tree.depths[node] - 1)
                order.append(num_new + node)
        # From the order in which they ran to that of the nodes.
        places = torch.tensor(order, device=self.device).argsort()
        of_logits = places[planned.num_positions - planned.num_logits :]
        of_logits = of_logits - (planned.num_positions - planned.num_logits)
        of_row = RowFeatures(torch.cat(features), places.tolist()) if features else None
        return torch.cat(logits)[of_logits], of_row

    def _run(
        self,
        cache: KVCache,
        token_ids: list[int],
        num_choices: int,
        *,
        with_features: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [num_choices, V] of the last tokens and features [tokens, ..] of all of them."""
        logits: list[Tensor] = []
        features: list[Tensor] = []
        while token_ids:
            piece, token_ids = token_ids[: self.rule.max_rows], token_ids[self.rule.max_rows :]
            num_here = min(len(piece), max(0, num_choices - len(token_ids)))
            own, own_features = self._run_piece(cache, piece, num_here, with_features)
            logits.append(own)
            if own_features is not None:
                features.append(own_features)
        return joined(logits), joined(features) if features else None

    def _run_piece(
        self, cache: KVCache, token_ids: list[int], num_choices: int, with_features: bool
    ) -> tuple[Tensor, Tensor | None]:
        start, num_real = cache.length, len(token_ids)
        self._num_forwards += 1
        # Rows that only fill up repeat the last token at its own position, so that no position past
        # the end is ever used; causal attention hides them from the real rows.
        num_fill = filled(num_real, self.rule) - num_real
        position_ids = [*range(start, start + num_real), *[start + num_real - 1] * num_fill]
        ids = torch.tensor([token_ids + token_ids[-1:] * num_fill, position_ids])
        ids = ids.to(self.device)
        cache.expect(num_real)
        # The head is a linear layer like the others; it runs on a few rows even if none is wanted.
        num_rows = filled(max(num_choices + num_fill, 1), self.rule)
        kept: int | Tensor = num_rows
        if with_features:
            # Of a number, some models leave the other rows out of their last layers too (Gemma 4).
            kept = torch.arange(ids.shape[1] - num_rows, ids.shape[1], device=self.device)
        logits = self.model(
            input_ids=ids[:1],
            position_ids=ids[1:],
            **{self._cache_argument: cache},
            use_cache=True,
            logits_to_keep=kept,
        ).logits[0]
        cache.truncate(start + num_real)
        end = logits.shape[0] - num_fill
        return logits[end - num_choices : end], self._take_features(num_real, with_features)

    @property
    def _num_memory_tokens(self) -> int:
        return self.memory.num_tokens

    @torch.inference_mode()
    def keep(self, planned: PlannedRow, nodes: Sequence[int]) -> None:
        """See Target.keep."""
        sequence, num_new = planned.row.sequence, len(planned.row.new_ids)
        cache, node_kv = self._caches[sequence.key], self._node_kv.pop(sequence.key, None)
        if node_kv is None:
            cache.truncate(sequence.num_cached + num_new + len(nodes))
            return
        cache.truncate(sequence.num_cached + num_new)
        for node in nodes:
            cache.append(node_kv[node])

    def truncate(self, key: int, length: int) -> None:
        """See Target.truncate."""
        self._node_kv.pop(key, None)
        if key in self._caches:
            self._caches[key].truncate(length)

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._caches.pop(key, None)
        self._node_kv.pop(key, None)

    @torch.inference_mode()
    def state_bytes(self) -> int:
        """Of the recurrent states of a sequence; see `recurrent.copies_states` for candidates."""
        cache = new_cache(self.model)
        if not isinstance(cache, StateCache):
            return 0
        self._run(cache, [0], 0)
        return cache.num_state_bytes

    @torch.inference_mode()
    def logits_of_split(
        self, token_ids: Sequence[int], split: Split, cache: KVCache | None = None
    ) -> Tensor:
        """See TransformersTarget.logits_of_split; goes on behind what `cache` holds."""
        assert sum(split) == len(token_ids)
        cache, logits, done = cache or new_cache(self.model), [], 0
        for length in split:
            logits.append(self._run(cache, list(token_ids[done : done + length]), length)[0])
            done += length
        return torch.cat(logits)

    @torch.inference_mode()
    def logits_at_border(self, token_ids: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
        """See TransformersTarget.logits_at_border; the tokens before are copies of a few."""
        cache, tail = new_cache(self.model), sum(TAIL_SPLIT)
        if start:
            self._run(cache, list(token_ids[: min(start, NUM_COPIED)]), 0)
            cache.repeat(start)
        cache.may_return(start + len(token_ids) - tail)
        together, _ = self._run(cache, list(token_ids), tail)
        cache.truncate(cache.length - tail)
        return together, self.logits_of_split(token_ids[-tail:], TAIL_SPLIT, cache)

    def release(self) -> None:
        """See TransformersTarget.release; also forgets all sequences."""
        self._caches = {}
        super().release()
