"""Planted faults: ways to break losslessness, wrapped around an engine from outside.

A proof that finds no difference says something only if it would find one. Each fault is something
that a real engine got wrong, or nearly; none needs a switch inside the engine.
"""

import copy
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Ids
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from blockdraft.core.plan import ForwardPlan
from blockdraft.core.sequence import Row, Sequence
from blockdraft.engine import engine as engine_module
from blockdraft.engine.engine import Engine
from blockdraft.kernels.backends import backend_for
from blockdraft.models.attention import exact
from blockdraft.models.attention.plan import AttentionPlan
from blockdraft.models.layers.graphs import without_graphs
from blockdraft.models.target.direct import DirectForward
from blockdraft.models.target.interface import TargetOutput
from blockdraft.speculate.sampler.choose import choices
from blockdraft.speculate.verify import Verdict, rows_of, verify
from blockdraft.text.grammar import GrammarState, Mask

Fault = Callable[[Engine], AbstractContextManager[None]]
"""Plants a fault in an engine and takes it out again."""

SEED_OF_REDRAWS = 0x5DEECE66D


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an object or a module another attribute for a while."""
    own = vars(owner)
    before = own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def keep_one_too_many(plan: ForwardPlan, logits: Tensor) -> list[Verdict]:
    """`verify` that keeps the first rejected draft, and chooses the bonus behind it."""

    def change(draft: list[int], rows: Tensor, row: Row, verdict: Verdict) -> Verdict:
        num = verdict.num_accepted + 1
        bonus = _choice_at(rows, row.sequence, draft, num)
        return _with_tokens(verdict, [*draft[:num], bonus], num)

    return _after_rejections(plan, logits, change)


def redraw_rejected(plan: ForwardPlan, logits: Tensor) -> list[Verdict]:
    """`verify` that throws away the choice that rejected a draft, and draws another."""

    def change(draft: list[int], rows: Tensor, row: Row, verdict: Verdict) -> Verdict:
        num = verdict.num_accepted
        token_id = redraw(rows, row.sequence, draft, num)
        return _with_tokens(verdict, [*draft[:num], token_id], num)

    return _after_rejections(plan, logits, change)


def redraw(logits: Tensor, sequence: Sequence, draft: list[int], index: int) -> int:
    """A choice with noise that no position owns."""
    other = copy.copy(sequence)
    other.seed = sequence.seed ^ SEED_OF_REDRAWS
    return _choice_at(logits, other, draft, index)


def _choice_at(logits: Tensor, sequence: Sequence, ahead: list[int], index: int) -> int:
    return next(islice(choices(logits, sequence, ahead), index, None))


def _after_rejections(
    plan: ForwardPlan,
    logits: Tensor,
    change: Callable[[list[int], Tensor, Row, Verdict], Verdict],
) -> list[Verdict]:
    """What `verify` says, every verdict with a rejection passed through `change`."""
    own, verdicts = rows_of(plan, logits), verify(plan, logits)
    return [
        change(list(planned.tree.tokens), rows, planned.row, verdict)
        if rows.shape[0] and verdict.num_accepted < len(planned.tree)
        else verdict
        for planned, rows, verdict in zip(plan, own, verdicts, strict=True)
    ]


def _with_tokens(verdict: Verdict, token_ids: list[int], num_accepted: int) -> Verdict:
    """Other tokens; log-probabilities stay one a token, where they are wanted."""
    logprobs = verdict.logprobs
    if logprobs:
        logprobs = [*logprobs, logprobs[-1]][: len(token_ids)]
    nodes = list(range(num_accepted))
    return replace(verdict, token_ids=token_ids, nodes=nodes, logprobs=logprobs)


@contextmanager
def verifying_by(faulty: Callable[[ForwardPlan, Tensor], list[Verdict]]) -> Iterator[None]:
    """Let engines verify by another function for a while."""
    with replaced(engine_module, "verify", faulty):
        yield


def accept_one_too_many(engine: Engine) -> AbstractContextManager[None]:
    """The first rejected draft is kept, and the bonus chosen behind it."""
    return verifying_by(keep_one_too_many)


def redraw_after_rejection(engine: Engine) -> AbstractContextManager[None]:
    """The choice that rejected a draft is thrown away and drawn again."""
    return verifying_by(redraw_rejected)


@contextmanager
def wrong_rollback(engine: Engine) -> Iterator[None]:
    """A rejected draft stays in the cache, in the place of the target's own token."""
    forward = engine.target.forward
    drafted: dict[int, tuple[int, list[int]]] = {}

    def faulty(plan: ForwardPlan) -> TargetOutput:
        rows = []
        for planned in plan:
            row = planned.row
            leftover = _with_leftover(row, *drafted.get(row.sequence.key, (0, [])))
            rows.append(replace(planned, row=leftover))
            drafted[row.sequence.key] = len(row.sequence.token_ids), list(planned.tree.tokens)
        return forward(ForwardPlan(rows))

    with replaced(engine.target, "forward", faulty):
        yield


def _with_leftover(row: Row, start: int, draft: list[int]) -> Row:
    """The row with the draft, made at position `start`, that its anchor took the place of."""
    index = len(row.sequence.token_ids) - 1 - start
    if row.is_prompt or not 0 <= index < len(draft):
        return row
    return replace(row, new_ids=[draft[index]])


@contextmanager
def shifted_features(engine: Engine) -> Iterator[None]:
    """The drafter gets for each token of a forward the features of the token beside it."""
    committed = engine.drafter.committed

    def faulty(row: Row, token_ids: Ids[int], features: Tensor | None) -> None:
        committed(row, token_ids, None if features is None else features.roll(1, dims=0))

    with replaced(engine.drafter, "committed", faulty):
        yield


@contextmanager
def attention_by_company(engine: Engine) -> Iterator[None]:
    """Attention rounds its results as suits the number of rows, as fast kernels do.

    Mathematically nothing changes.
    """

    def by_company(*arguments: Any) -> Any:
        attend = backend_for(*arguments).attend
        return SimpleNamespace(attend=_rounding_by_rows(attend, lambda query, *_: query.shape[1]))

    over_pages = _rounding_by_rows(
        AttentionPlan.attend, lambda plan, layer, attention, query, *_: query.shape[1]
    )
    with (
        replaced(exact, "backend_for", by_company),
        replaced(AttentionPlan, "attend", over_pages),
        # Whole layers offer no place to plant it in; their parts have the same bits.
        replaced(DirectForward, "may_run", lambda _: False),
        replaced(AttentionPlan, "run_layer", lambda *_: None),
        without_graphs(),
    ):
        yield


@contextmanager
def one_token_behind_drafts(engine: Engine) -> Iterator[None]:
    """Of what a grammar lets follow a draft, the first token is taken for all that may."""
    real = GrammarState.allowed

    def allowed(state: GrammarState, output_ids: list[int], ahead: list[int]) -> Mask | None:
        mask = real(state, output_ids, ahead)
        if mask is None or not ahead:
            return mask
        alone: Mask = np.arange(len(mask)) == mask.argmax()
        return alone

    with replaced(GrammarState, "allowed", allowed):
        yield


@contextmanager
def new_noise_after_preemption(engine: Engine) -> Iterator[None]:
    """The noise of a request that begins again is not that of its seed any more."""
    preempt = engine.scheduler.preempt

    def faulty(sequence: Sequence) -> None:
        preempt(sequence)
        sequence.seed ^= SEED_OF_REDRAWS

    with replaced(engine.scheduler, "preempt", faulty):
        yield


def _rounding_by_rows(
    attend: Callable[..., Tensor], num_rows: Callable[..., int]
) -> Callable[..., Tensor]:
    def faulty(*arguments: Any) -> Tensor:
        divisor = 1 + 2 * (num_rows(*arguments) // 4)
        return attend(*arguments) / divisor * divisor

    return faulty
