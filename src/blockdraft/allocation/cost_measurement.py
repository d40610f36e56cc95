"""What the phases of a step cost on this machine, measured once when an engine is loaded."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sizes
from contextlib import contextmanager
from statistics import median
from time import perf_counter

from blockdraft.allocation.costs import StepCosts
from blockdraft.core.errors import ModelError
from blockdraft.core.plan import ForwardPlan, PlannedRow, Proposal
from blockdraft.core.remembered import once
from blockdraft.core.request import SamplingParams
from blockdraft.core.sequence import Row, Sequence
from blockdraft.models.target import Target
from blockdraft.speculate.drafters.base import Drafter

FORWARD_ROWS = (1, 2, 4, 8, 16, 32, 64)
PLAIN_SEQUENCES = (1, 2, 4, 8)
DRAFT_SEQUENCES = (1, 2, 8)
"""Under a second on two cores; what is beyond is extrapolated, and then learned."""
_KEYS = range(-100, -100 + max(DRAFT_SEQUENCES))
"""Those of the engine are not negative."""


def measure_costs(target: Target, drafter: Drafter) -> StepCosts:
    """Time plain steps, forwards with drafts and draft forwards, on a token or two."""
    return StepCosts(*once("costs", lambda: _measure(target, drafter)))


def _measure(target: Target, drafter: Drafter) -> list[list[tuple[int, float]]]:
    """The points of `StepCosts`."""
    (sequence,) = _sequences(1)
    with _opened(target, drafter, [sequence]):
        # The sequence has drafted all rows but one; the logits of all are computed.
        row = Row(sequence, [0], 0)
        forward_points = measure_points(
            lambda num_rows: _forward(target, [_with_drafts(row, num_rows - 1)]), FORWARD_ROWS
        )
    sequences = _sequences(len(_KEYS))
    with _opened(target, drafter, sequences):
        rows = [Row(sequence, [0], drafter.max_nodes) for sequence in sequences]
        plain = [PlannedRow(row) for row in rows]
        plain_points = measure_points(lambda num: _forward(target, plain[:num]), PLAIN_SEQUENCES)
        output = target.forward(ForwardPlan(plain))
        for planned, features in zip(plain, output.features, strict=True):
            target.keep(planned, [])
            drafter.open(planned.row, 0)
            drafter.committed(planned.row, [0], features)
            planned.row.sequence.token_ids.append(0)
            planned.row.sequence.num_cached = 1
        drafter.propose(rows)  # catches up with the features, which is no part of a draft
        sequence_points = measure_points(lambda num: drafter.propose(rows[:num]), DRAFT_SEQUENCES)
    num_slots = 1 + drafter.max_nodes
    draft_points = [(num * num_slots, seconds) for num, seconds in sequence_points]
    return [plain_points, forward_points, draft_points]


def _with_drafts(row: Row, num: int) -> PlannedRow:
    return PlannedRow(row, Proposal.chain([0] * num, "none"))


def _forward(target: Target, rows: list[PlannedRow]) -> None:
    output = target.forward(ForwardPlan(rows))
    output.logits[-1, 0].item()  # waits for a device that works on after the call
    for planned in rows:
        target.truncate(planned.row.sequence.key, 0)


def _sequences(number: int) -> list[Sequence]:
    params = SamplingParams(max_tokens=max(FORWARD_ROWS))
    return [
        Sequence(key, params, 0, 0, frozenset(), token_ids=[0], num_prompt=1)
        for key in _KEYS[:number]
    ]


@contextmanager
def _opened(target: Target, drafter: Drafter, sequences: list[Sequence]) -> Iterator[None]:
    try:
        for sequence in sequences:
            target.memory.open(sequence.key, sequence.token_ids, with_context=True)
            num_tokens = max(FORWARD_ROWS) if len(sequences) == 1 else 1
            if not target.memory.reserve(sequence.key, num_tokens):
                raise ModelError(
                    f"the K/V memory of {target.memory.num_tokens} tokens is too small to measure "
                    "what a step costs; give more --memory"
                )
        yield
    finally:
        for sequence in sequences:
            target.close(sequence.key)
            drafter.close(sequence.key)


def measure_points(
    run: Callable[[int], object],
    sizes: Sizes[int],
    *,
    rounds: int = 3,
    clock: Callable[[], float] = perf_counter,
) -> list[tuple[int, float]]:
    """Median seconds of `run(size)` for each size.

    The sizes take turns, so that a busy moment of the machine falls on all of them.
    """
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(rounds):
        for size in sizes:
            start = clock()
            run(size)
            seconds[size].append(clock() - start)
    return [(size, median(times)) for size, times in seconds.items()]
