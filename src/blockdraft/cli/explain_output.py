"""Explanations on standard output."""

import sys
from collections.abc import Sequence

from rich.console import Console

from blockdraft.diagnose.explain.groups import Explained, Summary, group_prompts
from blockdraft.diagnose.explain.run import Explanation
from blockdraft.diagnose.explain.stream import longest_rejected_run
from blockdraft.diagnose.explain.sums import sum_all
from blockdraft.diagnose.explain.terminal import (
    LEGEND,
    draft_text,
    example_lines,
    groups_table,
    rounds_table,
    streams_table,
    summary_line,
    sums_tables,
)

FILE_WIDTH = 160
"""Columns where there is no terminal that says how many it has."""


def _console() -> Console:
    width = None if sys.stdout.isatty() else FILE_WIDTH
    # What users name their prompts is no markup.
    return Console(file=sys.stdout, width=width, highlight=False, markup=False)


def _print_drafts(explanation: Explanation) -> None:
    """The answer, with the drafts in it marked."""
    console = _console()
    console.print(draft_text(explanation), soft_wrap=True)
    console.print(f"[{LEGEND}]")


def print_one(explained: Explained, stall_limit: float | None) -> None:
    """One prompt: the answer, every round, the sums, and the streaming if it was timed."""
    console, explanation = _console(), explained.explanation
    _print_drafts(explanation)
    parts = [rounds_table(explanation), summary_line(explanation.sums)]
    parts += sums_tables(explanation.sums)
    if explained.streams is not None:
        longest = longest_rejected_run(explanation.rounds)
        parts.append(streams_table(explained.streams, longest, stall_limit))
    for part in parts:
        console.print("\n", part, sep="")


def print_many(summaries: Sequence[Summary]) -> None:
    """Many prompts: which kinds of them lose, the sums of all, and examples."""
    console, groups = _console(), group_prompts(summaries)
    sums = sum_all(one.sums for one in summaries)
    console.print(groups_table(groups))
    for part in (summary_line(sums), *sums_tables(sums), "examples"):
        console.print("\n", part, sep="")
    for line in example_lines(groups):
        console.print(line, soft_wrap=True)
