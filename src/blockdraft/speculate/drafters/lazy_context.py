"""The draft context of drafters that read features of the target, written only when they draft.

Features of committed tokens wait until the drafter drafts behind them. So a sequence that never
drafts costs no projection.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from blockdraft.core.plan import NOTHING, Proposal
from blockdraft.core.recorder import NO_RECORDER, Recorder, Work
from blockdraft.core.sequence import Row
from blockdraft.models.draft.context import ContextSpan, DraftContexts, LayerKV
from blockdraft.models.draft.dflash import DraftModel
from blockdraft.models.draft.eagle3 import Eagle3Model
from blockdraft.models.draft.waiting_features import Waiting

MAX_PROJECTED = 512
"""The most tokens whose features are projected at once, unless one page or sequence has more."""
MANY_SEQUENCES = 8
"""With more sequences that write outputs and may draft, features of outputs are given up while
hardly any of them drafts."""
_IDLE_SHARE, _ASKED_STEPS = 1 / 16, 32
"""Hardly any sequence drafts if no larger share of them was asked to, on average over about
_ASKED_STEPS steps. Tries, of one sequence at a time, stay below that."""
_TRIED = 8
"""One sequence in so many always keeps its features, so that the drafter can be tried for it."""
_NOTHING = nullcontext()


@dataclass(slots=True)
class _Context:
    """Of a sequence: `num_written` tokens are certain to be written, those up to `end` wait."""

    num_written: int
    end: int


class LazyContext(ABC):
    """Knows of each sequence how much of its context is written, and catches up when asked."""

    model: DraftModel | Eagle3Model
    contexts: DraftContexts

    def __init__(self) -> None:
        self.recorder: Recorder = NO_RECORDER
        self._known: dict[int, _Context] = {}
        self._share_asked = 1.0
        self._num_writing = self._num_kept = 0
        """Sequences whose outputs left features: in the last step, and in this one so far."""

    @abstractmethod
    def _draft_rows(self, rows: list[Row]) -> list[Proposal]:
        """Proposals of rows that share their forwards; all of their context is written."""

    @abstractmethod
    def _project(self, piece: list[Waiting]) -> list[LayerKV]:
        """Keys and values of what waits, per layer, each [1, kv_heads, tokens, head_dim]."""

    @abstractmethod
    def fresh_context(self, token_ids: Sequence[int], features: Tensor | None) -> list[LayerKV]:
        """What the context of a sequence's first tokens should be, computed from scratch.

        features: [tokens, num_features * hidden], None for a drafter that wants none. Returns per
        layer (k, v), each [1, kv_heads, tokens, head_dim].
        """

    def open(self, row: Row, num_reused: int) -> None:
        """See Drafter.open. Features of what was reused are written, or wait with their page."""
        self._known[row.sequence.key] = _Context(0, num_reused)
        self.contexts.reused(row.sequence.key, num_reused)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """See Drafter.propose."""
        self._num_writing, self._num_kept = self._num_kept, 0
        if self._num_writing:
            share = min(1.0, len(rows) / self._num_writing)
            self._share_asked += (share - self._share_asked) / _ASKED_STEPS
        # In most steps no row drafts with a model; what follows would take time for nothing.
        if not rows and not self.recorder.measures and not self.contexts.waiting.is_over:
            return []
        able = [row for row in rows if self._may_draft(row)]
        with torch.inference_mode():
            with self.recorder.phase("project"):
                self._catch_up(able)
            parts = [able] if self.contexts.together else [[row] for row in able]
            drafted = [own for part in parts if part for own in self._draft_rows(part)]
        proposals = dict(zip((row.sequence.key for row in able), drafted, strict=True))
        return [proposals.get(row.sequence.key, NOTHING) for row in rows]

    def _may_draft(self, row: Row) -> bool:
        return self.contexts.may_draft(row.sequence.key, row.sequence.num_cached)

    def lag(self, row: Row) -> int | None:
        """See Drafter.lag. Of what was reused most is written already."""
        if not self._may_draft(row):
            return None
        key = row.sequence.key
        known = self._known[key]
        if known.num_written == known.end:
            return 0
        return sum(map(len, self.contexts.needed(ContextSpan(key, known.num_written, known.end))))

    def num_written(self, key: int) -> int:
        """How many of a sequence's first tokens are certain to be in its draft context."""
        return self._known[key].num_written if key in self._known else 0

    def close(self, key: int) -> None:
        """Forget a sequence; unknown keys are fine, it may never have run."""
        self._known.pop(key, None)
        self.contexts.close(key)

    def _capturing(self) -> AbstractContextManager[None]:
        """The phase of keeping features, where work is measured; elsewhere it counts as commit.

        To enter a phase for each row takes a tenth of the commit of many sequences.
        """
        return self.recorder.phase("capture") if self.recorder.measures else _NOTHING

    def _keep(self, row: Row, features: Tensor) -> None:
        """Let features [new, ..] of the tokens behind what is cached wait, or do without them."""
        key, start = row.sequence.key, row.sequence.num_cached
        with self._capturing():
            self.contexts.keep(key, start, features, is_needed=not self._gives_up(row))
        self._extend(row, features.shape[0])

    def _gives_up(self, row: Row) -> bool:
        """True for most outputs where there are many sequences and hardly any of them drafts.

        Features of prompts are kept: later requests may begin with the same tokens.
        """
        is_idle = self._num_writing > MANY_SEQUENCES and self._share_asked < _IDLE_SHARE
        is_kept = row.is_prompt or row.sequence.key % _TRIED == 0
        return is_idle and not is_kept

    def _extend(self, row: Row, num_new: int) -> None:
        """Count tokens that wait now, behind those that were there."""
        known = self._known[row.sequence.key]
        assert known.end == row.sequence.num_cached
        known.end += num_new
        self._num_kept += not row.is_prompt
        if self.recorder.measures:
            self.recorder.add("capture", Work(rows=num_new))

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Project the features that these rows draft from, and the oldest if too many wait."""
        needed, num_prompt = self._needed(rows)
        if self.recorder.measures:
            self._record_projection(needed, num_prompt)
        for piece in _pieces(needed):
            self._write(piece)
        for row in rows:
            known = self._known[row.sequence.key]
            known.num_written = known.end

    def _write(self, piece: list[Waiting]) -> None:
        """Project what waits, and keep it as context."""
        self.contexts.write(piece, self._project(piece))

    def _needed(self, rows: Sequence[Row]) -> tuple[list[Waiting], int]:
        """What must be written now, and how many tokens of it are known to be of prompts."""
        needed: dict[int, Waiting] = {}
        num_prompt = 0
        for row in rows:
            key = row.sequence.key
            known = self._known[key]
            for waiting in self.contexts.needed(ContextSpan(key, known.num_written, known.end)):
                # Sequences that share a page share what waits.
                if waiting.holder not in needed:
                    needed[waiting.holder] = waiting
                    end = min(waiting.end, row.sequence.num_prompt)
                    num_prompt += max(0, end - waiting.start)
        for waiting in self.contexts.excess():
            needed.setdefault(waiting.holder, waiting)
        return list(needed.values()), num_prompt

    def _record_projection(self, needed: list[Waiting], num_prompt: int) -> None:
        """What is held, and what is about to be projected."""
        self.recorder.hold(
            context=sum(known.num_written for known in self._known.values()),
            waiting=self.contexts.waiting.num_tokens,
        )
        num_tokens = sum(map(len, needed))
        if num_prompt:
            self.recorder.add("draft_prefill", Work(num_prompt, forwards=num_prompt / num_tokens))
        if num_generated := num_tokens - num_prompt:
            self.recorder.add("inject", Work(num_generated, forwards=num_generated / num_tokens))


def _pieces(needed: list[Waiting]) -> Iterator[list[Waiting]]:
    """What is needed, in order, in parts that are small enough for the memory of a projection."""
    piece: list[Waiting] = []
    num_tokens = 0
    for waiting in needed:
        num_tokens += len(waiting)
        if piece and num_tokens > MAX_PROJECTED:
            yield piece
            piece, num_tokens = [], len(waiting)
        piece.append(waiting)
    if piece:
        yield piece
