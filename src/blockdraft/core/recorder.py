"""What the loop, the target and the drafter tell whoever measures them. No torch."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol, Self, runtime_checkable

Phase = Literal[
    "schedule",  # who runs
    "free",  # what is proposed without a model
    "project",  # the target's features become keys and values of the drafter
    "draft",  # the drafter's forward, and all of a proposal that no other phase claims
    "draft_head",  # logits of the drafted slots
    "guess",  # the choice rule on those logits
    "forward",  # the target's forward
    "capture",  # features kept for the drafter, and put side by side where the target did not
    "choose",  # the target's choices, and where the guesses end
    "commit",  # tokens appended, caches cut
    "controller",  # how much is drafted and verified
    "stream",  # text: tokens become letters and leave; in a measured run, all between steps
    "wait",  # nothing to do, or waiting for others
    "remainder",  # what no phase claims
]
"""Where time is measured."""

Line = Literal[
    "schedule",
    "free",
    "draft_prefill",  # of project: features of the prompt
    "inject",  # of project: features of generated tokens, and of any that waited for too long
    "draft",
    "draft_head",
    "guess",
    "prefill",  # of forward: rows of prompts
    "accepted",  # of forward: rows whose guess was kept
    "bonus",  # of forward: one row for each pass; all of plain decoding
    "siblings",  # of forward: rows of candidates beside a first child, unless they were kept
    "wasted",  # of forward: all other rows whose choice was thrown away
    "capture",
    "choose",
    "commit",
    "controller",
    "stream",
    "wait",
    "remainder",
]
"""Where time and work are accounted for: phases, two of them split by what their rows were for."""


@dataclass(slots=True)
class Work:
    """What was computed; works add up.

    rows: tokens or slots that went through the layers, without those that only fill a tile up.
    head_rows: of them through the head. pairs: queries times keys, keys: keys and values that were
    read, both in one layer. forwards: times that all weights were read; lines that share a forward
    have a share in it. sequences: that took part.
    """

    rows: int = 0
    head_rows: int = 0
    pairs: int = 0
    keys: float = 0.0
    forwards: float = 0.0
    sequences: int = 0

    def __iadd__(self, other: "Work") -> Self:
        # In place: this runs a dozen times a step.
        self.rows += other.rows
        self.head_rows += other.head_rows
        self.pairs += other.pairs
        self.keys += other.keys
        self.forwards += other.forwards
        self.sequences += other.sequences
        return self


_NOTHING = nullcontext()


class Recorder:
    """Takes notes of time and work. This one takes none, and costs nothing.

    Where work has to be counted first, ask `measures` before.
    """

    measures = False

    def phase(self, name: Phase) -> AbstractContextManager[None]:
        """Charge the time inside to a phase: `with recorder.phase("forward"): ...`. May nest."""
        return _NOTHING

    def add(self, line: Line, work: Work) -> None:
        """Count work."""

    def count(self, verified: Iterable[str], kept: Iterable[str]) -> None:
        """Count candidates: the source of each that was verified, and of each that was kept."""

    def hold(self, *, context: int, waiting: int) -> None:
        """Tokens in the draft context, and with features that wait to enter it, right now."""


NO_RECORDER = Recorder()
"""The recorder of what is not measured."""


@runtime_checkable
class Recorded(Protocol):
    """A target or drafter that tells a recorder what it does; the engine sets it."""

    recorder: Recorder
