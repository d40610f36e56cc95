"""A drafter that shows its logits, and runs of the engine with every round recorded."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdraft.core.plan import Proposal
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Constraint, Row
from blockdraft.diagnose.explain.groups import Explained
from blockdraft.diagnose.explain.record import recording
from blockdraft.diagnose.explain.report import make_report
from blockdraft.diagnose.explain.round import Round
from blockdraft.engine.engine import Engine
from blockdraft.speculate.commit import StepOutput
from blockdraft.speculate.drafters.base import Watch
from blockdraft.speculate.sampler.choose import choices
from tests.fakes import FakeDrafter, TableTarget

VOCAB_SIZE = 31


class TellingDrafter(FakeDrafter):
    """Logits of a slot are `table[slot, anchor]` [V]; `unsayable` tokens are never guessed."""

    def __init__(self, table: Tensor, unsayable: Collection[int] = ()) -> None:
        super().__init__(table.shape[0])
        self.table = table.clone()
        self.table[:, :, list(unsayable)] = -torch.inf
        self.watch: Watch | None = None

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        if self.watch is not None and rows:
            self.watch(list(rows), torch.stack([self._logits(row) for row in rows]))
        return [Proposal.chain(self._guesses(row), self.kind) for row in rows]

    def _logits(self, row: Row) -> Tensor:
        return self.table[:, row.sequence.token_ids[-1]]

    def _guesses(self, row: Row) -> list[int]:
        guessed: list[int] = []
        for token_id in choices(self._logits(row)[: row.num_draft_tokens], row.sequence, guessed):
            guessed.append(token_id)
        return guessed


def like_target(target: TableTarget, *, num_slots: int, wrong: float, seed: int) -> TellingDrafter:
    """A drafter that knows the first slot's logits but for the last token but one, and errs."""
    generator = torch.Generator().manual_seed(seed)
    known = target.table.mean(dim=0)
    shape = (num_slots, *known.shape)
    return TellingDrafter(known + wrong * torch.randn(shape, generator=generator))


def record(
    engine: Engine,
    params: SamplingParams,
    prompt: Collection[int] = (1, 2, 3),
    *,
    eos_ids: frozenset[int] = frozenset(),
    constraint: Constraint | None = None,
    scan_stop: Callable[[int], bool] | None = None,
) -> tuple[list[Round], list[StepOutput]]:
    """The rounds of one sequence, and what the engine said of it."""
    outputs: list[StepOutput] = []
    with recording(engine) as recorder:
        engine.add(
            list(prompt), params, eos_ids=eos_ids, constraint=constraint, scan_stop=scan_stop
        )
        while engine.has_work:
            outputs += engine.step()
        (rounds,) = recorder.take()
    return rounds, outputs


def report_of(explained: Iterable[Explained], stall_limit: float | None = None) -> dict[str, Any]:
    """As the command makes it for JSON and the page."""
    prompts = list(explained)
    described = [one.to_dict(stall_limit) for one in prompts]
    return make_report(described, [one.summary for one in prompts])


def num_rejections(outputs: list[StepOutput]) -> int:
    """Rounds of which some draft was not committed, counted from what the engine reports."""
    return sum(output.num_drafted > output.num_accepted for output in outputs if output.token_ids)
