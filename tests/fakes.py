"""Drafters of every quality, and a target whose probabilities are known exactly."""

import random
from collections.abc import Mapping
from collections.abc import Sequence as IdSequence
from typing import Any, Self

import torch
from torch import Tensor

from blockdraft.cache.memory import Memory
from blockdraft.cache.pages import PAGE_SIZE, Pages
from blockdraft.core.plan import ROOT, ForwardPlan, PlannedRow, Proposal
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target.interface import TargetOutput
from blockdraft.speculate.drafters.base import DraftCost

Rows = IdSequence[Row]
Ids = IdSequence[int]

NEVER_WRITTEN = -1


class FakeDrafter:
    """Base of drafters that guess from token ids alone; `guess` may return fewer tokens."""

    kind = "fake"
    cost: DraftCost = "block"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes

    def open(self, row: Row, num_reused: int) -> None:
        """Nothing to prepare."""

    def lag(self, row: Row) -> int:
        return 0

    def propose(self, rows: Rows) -> list[Proposal]:
        return [Proposal.chain(self.guess(row.sequence, row.num_slots), self.kind) for row in rows]

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        raise NotImplementedError

    def committed(self, row: Row, token_ids: Ids, features: Tensor | None) -> None:
        assert features is None, "a drafter without feature layers gets no features"
        start = row.sequence.num_cached
        assert list(token_ids) == row.sequence.token_ids[start : start + len(token_ids)]

    def close(self, key: int) -> None:
        """Nothing to forget."""


class RandomDrafter(FakeDrafter):
    def __init__(self, max_nodes: int, vocab_size: int, seed: int = 0) -> None:
        super().__init__(max_nodes)
        self.vocab_size = vocab_size
        self.random = random.Random(seed)

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(num)]


class ConstantDrafter(FakeDrafter):
    def __init__(self, max_nodes: int, token_id: int) -> None:
        super().__init__(max_nodes)
        self.token_id = token_id

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        return [self.token_id] * num


class OracleDrafter(FakeDrafter):
    """Knows the plain output of each sequence by key, and drafts past its end with token 0."""

    def __init__(self, max_nodes: int, known: Mapping[int, list[int]] | None = None) -> None:
        super().__init__(max_nodes)
        self.known: dict[int, list[int]] = dict(known or {})

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        truth = self.known.get(sequence.key, [])
        future = truth[sequence.num_output : sequence.num_output + num]
        return future + [0] * (num - len(future))


class AlwaysWrongDrafter(OracleDrafter):
    """Knows the plain output and never guesses it."""

    def __init__(self, max_nodes: int, vocab_size: int) -> None:
        super().__init__(max_nodes)
        self.vocab_size = vocab_size

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        return [(token_id + 1) % self.vocab_size for token_id in super().guess(sequence, num)]


class NoisyOracleDrafter(OracleDrafter):
    """Right with a given chance per slot, and sometimes drafts fewer tokens than it may."""

    def __init__(
        self, max_nodes: int, vocab_size: int, *, chance: float = 0.75, seed: int = 0
    ) -> None:
        super().__init__(max_nodes)
        self.vocab_size = vocab_size
        self.chance = chance
        self.random = random.Random(seed)

    def guess(self, sequence: Sequence, num: int) -> list[int]:
        if self.random.random() < 0.1:
            num = self.random.randint(0, num)
        return [
            token_id
            if self.random.random() < self.chance
            else self.random.randrange(self.vocab_size)
            for token_id in super().guess(sequence, num)
        ]


class TableTarget:
    """A target whose logits are a table of the last two tokens: `table` [V, V, V].

    It keeps the cached token ids of each sequence and answers from them, so a cache that was cut
    wrongly shows in the logits. `forwards` records (key, first position, token ids) of each row.
    """

    takes_trees = True

    def __init__(self, table: Tensor, max_context: int = 4096) -> None:
        self.table = table
        self.memory: Memory = Memory()
        self.vocab_size: int = table.shape[-1]
        self.max_context = max_context
        self.cached: dict[int, list[int]] = {}
        self.forwards: list[tuple[int, int, list[int]]] = []

    @classmethod
    def random(cls, vocab_size: int = 97, seed: int = 0, **kwargs: Any) -> Self:
        generator = torch.Generator().manual_seed(seed)
        return cls(2.0 * torch.randn((vocab_size,) * 3, generator=generator), **kwargs)

    def forward(self, plan: ForwardPlan) -> TargetOutput:
        logits = []
        for planned in plan:
            row, tree = planned.row, planned.tree
            cached = self._cached(row.sequence)
            self.forwards.append((row.sequence.key, len(cached), planned.token_ids))
            self._extend(row.sequence.key, len(cached), planned.token_ids)
            rows = []
            for node in [ROOT, *range(len(tree))] if planned.num_choices else []:
                path = [tree.tokens[i] for i in tree.path(node)]
                before, last = [0, *cached, *row.new_ids, *path][-2:]
                rows.append(self.table[before, last])
            logits.append(torch.stack(rows) if rows else self.table.new_empty(0, self.vocab_size))
        return TargetOutput(torch.cat(logits), [None] * len(plan))

    def keep(self, planned: PlannedRow, nodes: Ids) -> None:
        num_before = planned.row.sequence.num_cached + len(planned.row.new_ids)
        cached = self.cached[planned.row.sequence.key]
        cached[num_before:] = [planned.tree.tokens[node] for node in nodes]

    def _cached(self, sequence: Sequence) -> list[int]:
        """A copy of what is held of a sequence."""
        cached = self.cached.setdefault(sequence.key, [])
        assert len(cached) == sequence.num_cached
        return list(cached)

    def _extend(self, key: int, start: int, new: list[int]) -> None:
        self.cached[key].extend(new)

    def truncate(self, key: int, length: int) -> None:
        cached = self.cached.get(key, [])
        assert length <= len(cached)
        del cached[length:]

    def close(self, key: int) -> None:
        self.cached.pop(key, None)


class PagedTableTarget(TableTarget):
    """A TableTarget that keeps token ids in pages, which sequences share and take over.

    A page that holds other tokens than those of the sequence that reads it raises AssertionError.
    """

    takes_trees = False

    def __init__(self, table: Tensor, memory: Pages, max_context: int = 4096) -> None:
        super().__init__(table, max_context)
        self.memory: Pages = memory
        self.slots = [NEVER_WRITTEN] * (memory.num_pages * PAGE_SIZE)

    def _slots(self, key: int, start: int, end: int) -> list[int]:
        page_ids = self.memory.page_ids(key)
        return [page_ids[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(start, end)]

    def _cached(self, sequence: Sequence) -> list[int]:
        slots = self._slots(sequence.key, 0, sequence.num_cached)
        cached = [self.slots[slot] for slot in slots]
        assert cached == sequence.token_ids[: sequence.num_cached], "a page holds other tokens"
        return cached

    def _extend(self, key: int, start: int, new: list[int]) -> None:
        for slot, token_id in zip(self._slots(key, start, start + len(new)), new, strict=True):
            self.slots[slot] = token_id

    def keep(self, planned: PlannedRow, nodes: Ids) -> None:
        """What is behind the end is written again before it is read."""

    def truncate(self, key: int, length: int) -> None:
        """See above."""

    def close(self, key: int) -> None:
        self.memory.close(key)
