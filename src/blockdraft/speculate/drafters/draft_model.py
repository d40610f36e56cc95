"""A small language model as a drafter: the first form of speculative decoding (arXiv 2211.17192).

It runs as targets do, in pages or one sequence after another, with a cache and a prefix chain of
its own, and needs nothing of the target. Each level of a tree is a forward; the levels above it,
which are few rows, are computed again, as no part of a tree can be kept before the target has
decided.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdraft.core.plan import NO_NODES, NOTHING, ROOT, ForwardPlan, PlannedRow, Proposal, Tree
from blockdraft.core.recorder import NO_RECORDER, Line, Recorder, Work
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row
from blockdraft.core.sequence import Sequence as Sample
from blockdraft.models.target.interface import Target
from blockdraft.speculate.drafters.base import DraftCost, Watch
from blockdraft.speculate.drafters.levels import DEPTH, Child, LevelGrower
from blockdraft.speculate.drafters.slots import Guessable

WIDTH = 4
"""Nodes of a level that are expanded; each costs a row of the model."""

_FEW = 64
"""If the drafter lacks no more tokens, the first level computes them too; else a forward before it.
"""

_PARAMS = SamplingParams(num_draft_tokens=0)
"""Nobody drafts for the drafter."""


@dataclass(slots=True)
class _Growing:
    """The drafter's own sequence for a row, and the tree that grows behind it."""

    sample: Sample
    tree: Tree = NO_NODES
    level: list[int] = field(default_factory=lambda: [ROOT])
    """The nodes of the last level, in order; none where the tree has ended."""

    def add(self, children: Sequence[Child]) -> None:
        """Another level below the last one."""
        parents = [self.level[child.parent] for child in children]
        num = len(self.tree)
        tokens = [child.token_id for child in children]
        self.tree = Tree((*self.tree.tokens, *tokens), (*self.tree.parents, *parents))
        self.level = list(range(num, num + len(children)))


class DraftModelDrafter:
    """Drafts with a causal language model of the target's tokenizer.

    `max_nodes` and `watch` may be set; neither changes any output.

    model: the draft model, which runs as targets do. vocab_size: of the target; where the two are
    padded to different sizes, only tokens of both are guessed, and others are read as the
    drafter's last token.
    """

    kind = "draft_model"
    cost: DraftCost = "level"
    feature_layers: tuple[int, ...] = ()

    def __init__(self, model: Target, vocab_size: int) -> None:
        self.model = model
        self.max_nodes = DEPTH
        self.watch: Watch | None = None
        self.recorder: Recorder = NO_RECORDER
        self._guessable = Guessable(vocab_size)
        self._samples: dict[int, Sample] = {}
        self._reusable: dict[int, int] = {}
        """Of each sequence the first tokens that earlier ones had left when it began."""

    @property
    def num_guessable(self) -> int:
        """Tokens that may be guessed."""
        return min(self.model.vocab_size, self._guessable.vocab_size)

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. What the target reuses, the drafter may have to compute."""
        key, memory = row.sequence.key, self.model.memory
        self.close(key)
        if not row.sequence.allows(self.kind):
            return
        token_ids = self._readable(row.sequence.token_ids)
        self._reusable[key] = memory.open(key, token_ids, with_context=False)
        memory.put_back(key)  # unless it is drafted for, others may need the room

    def lag(self, row: Row) -> int | None:
        """See Drafter.lag."""
        if len(row.sequence.token_ids) >= self.model.max_context:
            return None
        key, num_cached = row.sequence.key, row.sequence.num_cached
        own = self._samples.get(key)
        known = self._reusable.get(key, 0) if own is None else own.num_cached
        return max(0, num_cached - known)

    def committed(self, row: Row, token_ids: Sequence[int], features: Tensor | None) -> None:
        """See Drafter.committed. The sequence itself has the tokens."""

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        was_open = self._reusable.pop(key, None) is not None
        if self._samples.pop(key, None) is not None:
            self.model.close(key)
        elif was_open:
            self.model.memory.close(key)

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """See Drafter.propose: a chain of the drafter's choices, or the best of a dynamic tree.

        Less, or nothing, for a row without room in the drafter's memory or context.
        """
        prepared = [own for row in rows if (own := self._prepare(row)) is not None]
        if not prepared:
            return [NOTHING] * len(rows)
        able = {row.sequence.key: self._with_room(row) for row in prepared}
        with self.recorder.phase("project"):
            self._catch_up([*able.values()])
        found = dict(zip(able, self._draft([*able.values()]), strict=True))
        return [found.get(row.sequence.key, NOTHING) for row in rows]

    def _prepare(self, row: Row) -> Row | None:
        """Give the drafter's own sequence the row's tokens, and room for these.

        Returns the row, limited to the drafter's context; None if there is no room. What earlier
        trees have left to other sequences is taken.
        """
        sequence, key, memory = row.sequence, row.sequence.key, self.model.memory
        num_tokens = len(sequence.token_ids)
        if num_tokens >= self.model.max_context:
            return None
        row = row.within(self.model.max_context - num_tokens)
        known = self._samples.get(key)
        if known is None:
            token_ids = self._readable(sequence.token_ids)
            known = Sample(key, _PARAMS, 0, 0, frozenset(), token_ids, num_tokens)
            known.num_cached = memory.open(key, token_ids, with_context=False)
            self._samples[key] = known
        known.token_ids += self._readable(sequence.token_ids[len(known.token_ids) :])
        # A proposal that failed may have left more.
        self.model.truncate(key, known.num_cached)
        if memory.reserve(key, num_tokens):
            return row
        for other, own in self._samples.items():
            memory.trim(other, len(own.token_ids))
        return row if memory.reserve(key, num_tokens) else None

    def _with_room(self, row: Row) -> Row:
        """Reserve room for a tree; where there is none, the row is limited to a chain that fits."""
        key, num_tokens = row.sequence.key, len(row.sequence.token_ids)
        memory = self.model.memory
        if memory.reserve(key, num_tokens + 1 + (row.num_slots - 1) * WIDTH):
            return row
        # The last token of a chain is not computed.
        return row.within(min(row.num_slots, memory.room(key) - num_tokens + 1))

    def _readable(self, token_ids: Sequence[int]) -> list[int]:
        last = self.model.vocab_size - 1
        return [min(token_id, last) for token_id in token_ids]

    def _catch_up(self, rows: list[Row]) -> None:
        """Compute what the drafter lacks of long texts; the first level takes a short rest."""
        samples = [self._samples[row.sequence.key] for row in rows]
        late = [own for own in samples if len(own.token_ids) - 1 - own.num_cached > _FEW]
        if late:
            new_ids = [own.token_ids[own.num_cached : -1] for own in late]
            self._forward(late, new_ids, [NO_NODES] * len(late), "draft_prefill")

    def _draft(self, rows: list[Row]) -> list[Proposal]:
        growing = [_Growing(self._samples[row.sequence.key]) for row in rows]
        grower = LevelGrower(rows, self._guessable, WIDTH, self.watch)

        def advance(levels: list[list[Child]]) -> Tensor:
            for own, children in zip(growing, levels, strict=True):
                own.add(children)
            return self._level(growing)

        with self.recorder.phase("guess"):
            grower.grow(self._level(growing), advance)
        return [tree.proposal(self.kind) for tree in grower.trees]

    def _level(self, growing: list[_Growing]) -> Tensor:
        """Logits [b, w, n] behind the last level of each row; shorter ones are filled up."""
        asked = [own for own in growing if own.level]
        samples = [own.sample for own in asked]
        new_ids = [own.token_ids[own.num_cached :] for own in samples]
        with self.recorder.phase("draft"):
            logits = self._forward(samples, new_ids, [own.tree for own in asked])
        width = max(len(own.level) for own in asked)
        found = logits[0].new_zeros(len(growing), width, self.num_guessable)
        of_row = iter(logits)
        for row, own in zip(found, growing, strict=True):
            if own.level:
                # The first logits are those behind the anchor.
                wanted = [1 + node for node in own.level]
                row[: len(wanted)] = next(of_row)[wanted, : self.num_guessable]
        return found

    def _forward(
        self,
        samples: list[Sample],
        new_ids: list[list[int]],
        trees: list[Tree],
        line: Line = "draft",
    ) -> list[Tensor]:
        """Logits [1 + nodes, V] behind the new tokens and their trees, none before the anchor.

        What stays in the cache are the tokens before the anchor.
        """
        plan = [
            PlannedRow(
                Row(own, ids, len(tree)),
                Proposal(tree, (1.0,) * len(tree), (self.kind,) * len(tree)),
            )
            for own, ids, tree in zip(samples, new_ids, trees, strict=True)
        ]
        sizes = [planned.num_logits for planned in plan]
        if self.recorder.measures:
            work = Work(
                rows=sum(planned.num_positions for planned in plan),
                head_rows=sum(sizes),
                pairs=sum(planned.num_positions * planned.num_keys for planned in plan),
                keys=sum(planned.num_keys for planned in plan),
                forwards=1,
                sequences=len(plan),
            )
            self.recorder.add(line, work)
        logits = self.model.forward(ForwardPlan(plan)).logits
        for own in samples:
            own.num_cached = len(own.token_ids) - 1
            self.model.truncate(own.key, own.num_cached)
            self.model.memory.publish(own.key, own.token_ids, own.num_cached)
        return list(torch.split(logits, sizes))
