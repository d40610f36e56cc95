"""What the target computed in a step, and for what."""

from collections.abc import Sequence
from dataclasses import dataclass

from blockdraft.core.plan import ForwardPlan
from blockdraft.core.recorder import Line, Recorder, Work
from blockdraft.speculate.commit import StepOutput


@dataclass(frozen=True, slots=True)
class RowWork:
    """The rows of one sequence in a forward of the target, before it is known what is kept.

    num_keys: tokens that the deepest row attends to, which is what all of them are computed with.
    num_siblings: candidates that are not the first child of their parent.
    """

    is_prompt: bool
    num_rows: int
    num_head_rows: int
    num_keys: int
    num_siblings: int = 0


def rows_work(plan: ForwardPlan) -> list[RowWork]:
    """The work of a forward, to be called before it is committed."""
    return [
        RowWork(
            is_prompt=planned.row.is_prompt,
            num_rows=planned.num_positions,
            num_head_rows=planned.num_logits,
            num_keys=planned.num_keys,
            num_siblings=sum(rank > 0 for rank in planned.tree.ranks),
        )
        for planned in plan
    ]


def lines_of(rows: RowWork, output: StepOutput) -> dict[Line, int]:
    """How many rows served what.

    A row gives the token behind it. Those of kept candidates are accepted, that of the target's own
    token behind them is the bonus. All others gave nothing: siblings, and what is wasted behind the
    first candidate that was wrong, or behind a stop. Plain decoding is one bonus a pass.
    """
    if rows.is_prompt:
        return {"prefill": rows.num_rows}
    num_kept = len(output.token_ids)
    num_accepted = output.num_accepted
    lines: dict[Line, int] = {"accepted": num_accepted, "bonus": num_kept - num_accepted}
    num_siblings = rows.num_siblings - output.num_siblings_kept
    if num_siblings:
        lines["siblings"] = num_siblings
    return lines | {"wasted": rows.num_rows - num_kept - num_siblings}


def record_step(
    recorder: Recorder,
    planned: Sequence[RowWork],
    outputs: Sequence[StepOutput],
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
        recorder.count(output.sources, output.kept_sources)
    num_passes = sum(not rows.is_prompt for rows in planned)
    recorder.add("bonus", Work(sequences=num_passes))
    recorder.add("prefill", Work(sequences=len(planned) - num_passes))
    recorder.add("choose", Work(head_rows=sum(rows.num_head_rows for rows in planned)))
    recorder.add("commit", Work(rows=num_tokens))
    recorder.add("stream", Work(rows=num_tokens))
