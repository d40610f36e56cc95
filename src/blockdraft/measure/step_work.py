"""What the target computed in a step, and for what. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.core.recorder import Line, Recorder, Work
from blockdraft.core.sequence import Batch, DraftBlock


class Committed(Protocol):
    """What is asked of a StepOutput."""

    @property
    def token_ids(self) -> list[int]:
        """Committed tokens."""

    @property
    def num_accepted(self) -> int:
        """Guesses that the target agreed with, before any cut at a stop."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """The rows of one sequence in a forward of the target, before it is known what is kept.

    num_keys: tokens that the last row attends to, which is what all of them are computed with.
    """

    is_prompt: bool
    num_rows: int
    num_head_rows: int
    num_keys: int


def rows_work(batch: Batch, block: DraftBlock) -> list[RowWork]:
    """The work of a forward, to be called before it is committed."""
    planned = []
    for row, draft in zip(batch, block, strict=True):
        num_rows = len(row.new_ids) + len(draft)
        num_head_rows = row.num_logits(len(draft))
        num_keys = row.sequence.num_cached + num_rows
        planned.append(RowWork(row.is_prompt, num_rows, num_head_rows, num_keys))
    return planned


def lines_of(rows: RowWork, output: Committed) -> dict[Line, int]:
    """How many rows served what.

    A row of a block gives the token behind it. Those of kept guesses are accepted, that of the
    target's own token behind them is the bonus, and all others are wasted: behind the first guess
    that was wrong, or behind a stop. Plain decoding is one bonus a pass.
    """
    if rows.is_prompt:
        return {"prefill": rows.num_rows}
    num_kept = len(output.token_ids)
    num_accepted = min(num_kept, output.num_accepted)
    return {
        "accepted": num_accepted,
        "bonus": num_kept - num_accepted,
        "wasted": rows.num_rows - num_kept,
    }


def record_step(
    recorder: Recorder,
    planned: Sequence[RowWork],
    outputs: Sequence[Committed],
    num_forwards: int,
) -> None:
    """Count the work of a committed step; lines that share forwards share them by their rows."""
    num_all = sum(rows.num_rows for rows in planned)
    num_tokens = sum(len(output.token_ids) for output in outputs)
    for rows, output in zip(planned, outputs, strict=True):
        for line, num in lines_of(rows, output).items():
            share = num / rows.num_rows
            work = Work(
                rows=num,
                head_rows=num if not rows.is_prompt else rows.num_head_rows,
                pairs=num * rows.num_keys,
                keys=rows.num_keys * share,
                forwards=num_forwards * num / num_all,
            )
            recorder.add(line, work)
    num_passes = sum(not rows.is_prompt for rows in planned)
    recorder.add("bonus", Work(sequences=num_passes))
    recorder.add("prefill", Work(sequences=len(planned) - num_passes))
    recorder.add("choose", Work(head_rows=sum(rows.num_head_rows for rows in planned)))
    recorder.add("commit", Work(rows=num_tokens))
    recorder.add("stream", Work(rows=num_tokens))
