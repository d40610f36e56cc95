"""Recording every round of a run from outside: an observer of the engine and of its drafter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from blockdraft.core.plan import ROOT, ForwardPlan
from blockdraft.core.sequence import Row
from blockdraft.diagnose.explain.cause import Slot, find_cause, weigh
from blockdraft.diagnose.explain.round import Rejection, Round
from blockdraft.engine.engine import Engine
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.base import Watchable
from blockdraft.speculate.merge import sources_of
from blockdraft.speculate.verify import Verdict, rows_of


@dataclass(frozen=True, slots=True)
class _Pending:
    """A round that is verified and not yet committed. `rejection` knows nothing of an end."""

    start: int
    drafted_ids: tuple[int, ...]
    sources: tuple[str, ...]
    num_beside: int
    is_prompt: bool
    stop_ids: frozenset[int]
    rejection: Rejection | None


class Recorder:
    """Keeps the rounds of every sequence; a step that is made again counts once.

    `watched` is the kind of the drafter whose thoughts are shown.
    """

    def __init__(self, watched: str) -> None:
        self._watched = watched
        self._thoughts: dict[int, Tensor] = {}
        self._pending: dict[int, _Pending] = {}
        self._rounds: dict[int, list[Round]] = {}

    def take(self) -> list[list[Round]]:
        """The rounds of each sequence since the last call, in the order of their requests."""
        rounds, self._rounds = self._rounds, {}
        self._thoughts.clear()
        self._pending.clear()
        # Keys are given out in ascending order.
        return [rounds[key] for key in sorted(rounds)]

    def guessed(self, rows: list[Row], logits: Tensor) -> None:
        """See Watch."""
        for row, own in zip(rows, logits, strict=True):
            self._thoughts[row.sequence.key] = own

    def verified(self, plan: ForwardPlan, logits: Tensor, verdicts: list[Verdict]) -> None:
        """See Observer."""
        for planned, own, verdict in zip(plan, rows_of(plan, logits), verdicts, strict=True):
            row, tree = planned.row, planned.tree
            # Of a tree, the way that was kept and what would have followed it first.
            path = tree.through(verdict.nodes)
            draft = [tree.tokens[node] for node in path]
            sources = [planned.proposal.sources[node] for node in path]
            self._pending[row.sequence.key] = _Pending(
                start=row.sequence.num_output,
                drafted_ids=tuple(draft),
                is_prompt=row.is_prompt,
                stop_ids=row.sequence.stop_ids,
                sources=tuple(sources),
                num_beside=len(tree) - len(path),
                rejection=self._rejection(row, draft, sources, own, verdict),
            )
        self._thoughts.clear()

    def _rejection(
        self,
        row: Row,
        draft: list[int],
        sources: list[str],
        logits: Tensor,
        verdict: Verdict,
    ) -> Rejection | None:
        """logits: [1 + nodes, V]."""
        place = verdict.num_accepted
        if place == len(draft):
            return None
        last = verdict.nodes[-1] if verdict.nodes else ROOT
        if verdict.error is not None:
            return Rejection(place, draft[place], "other", None)
        # Who looks up has no thoughts, and the model may have drafted something else.
        thoughts = None
        if self._watched in sources_of(sources[place]):
            thoughts = self._thoughts.get(row.sequence.key)
        slot = Slot(
            sequence=row.sequence,
            ahead=draft[:place],
            drafted_id=draft[place],
            wanted_id=verdict.token_ids[place],
            target=logits[1 + last],
            drafter=None if thoughts is None else thoughts[place],
        )
        evidence = weigh(slot)
        return Rejection(place, draft[place], find_cause(slot, evidence), evidence)

    def reported(self, outputs: list[StepOutput]) -> None:
        """See Observer."""
        for output in outputs:
            pending = self._pending.pop(output.key, None)
            # A chunk of a prompt commits nothing, and a step without memory verifies nothing.
            if pending is None or not output.token_ids:
                continue
            num_kept = output.num_accepted
            self._rounds.setdefault(output.key, []).append(
                Round(
                    start=pending.start,
                    drafted_ids=pending.drafted_ids,
                    sources=pending.sources,
                    token_ids=tuple(output.token_ids),
                    num_kept=num_kept,
                    is_prompt=pending.is_prompt,
                    rejection=_with_end(pending, output, num_kept),
                    num_beside=pending.num_beside,
                )
            )


def _with_end(pending: _Pending, output: StepOutput, num_kept: int) -> Rejection | None:
    """The rejection, given what was committed.

    Its cause is "stop" if the answer ended on a kept draft with drafts behind it, or if the target
    wanted a token that ends the answer, and the drafter went on.
    """
    drafted = pending.drafted_ids
    if num_kept < len(drafted) and num_kept == len(output.token_ids):
        if output.finish_reason == "stop":
            return Rejection(num_kept, drafted[num_kept], "stop", None)
    elif pending.rejection is not None and output.token_ids[-1] in pending.stop_ids:
        return Rejection(
            pending.rejection.slot, pending.rejection.drafted_id, "stop", pending.rejection.evidence
        )
    return pending.rejection


@contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Record what an engine does inside. Nothing may be running at either end."""
    drafter = engine.drafter
    recorder = Recorder(drafter.kind)
    engine.observer = recorder
    if isinstance(drafter, Watchable):
        drafter.watch = recorder.guessed
    try:
        yield recorder
    finally:
        engine.observer = None
        if isinstance(drafter, Watchable):
            drafter.watch = None
