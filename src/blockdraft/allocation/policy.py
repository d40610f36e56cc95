"""Who drafts, and which candidates are verified: what an allocator asks. No torch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.core.plan import Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Row

DEFAULT_NUM_DRAFT_TOKENS = 15
"""The most candidates of a sequence where as many are verified as pay."""


@dataclass(frozen=True, slots=True)
class DepthUse:
    """How many candidates were verified. A pass is one sequence in one step.

    `shares` is the share of passes by their candidates, for numbers that occurred.
    """

    num_passes: int
    mean_depth: float
    shares: dict[int, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the target verified of a sequence, and the nodes of the path that it kept."""

    row: Row
    proposal: Proposal
    kept_nodes: Sequence[int]


class Policy(Protocol):
    """Is asked three times in a step about its decoding rows, and told what came of it.

    The same history gives the same answers.
    """

    def asks_free(self, num_rows: int) -> bool:
        """False if what needs no model is not worth being proposed for so many rows."""
        ...

    def limit(
        self, rows: Sequence[Row], num_other_rows: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """The rows with as many candidates, on paths as deep, as a model is to propose at most.

        num_other_rows: rows of prompts in the same forward. free: of each row what is proposed
        already, without a model.
        """
        ...

    def choose(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Proposal]:
        """What is verified of each proposal: some of its nodes, each with its parent."""
        ...

    def record(self, outcomes: Sequence[Outcome], seconds: Mapping[Phase, float]) -> None:
        """Take the outcomes of the last step, before any cut at a stop, and where its time went."""
        ...

    def close(self, key: int) -> None:
        """Forget a sequence, known or not."""
        ...

    def summary(self) -> DepthUse:
        """What was verified so far."""
        ...


class Use:
    """Counts how many candidates are verified."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def count(self, proposals: Sequence[Proposal]) -> None:
        """One step."""
        self._counts.update(map(len, proposals))

    def summary(self) -> DepthUse:
        """All steps."""
        num_passes = self._counts.total()
        return DepthUse(
            num_passes=num_passes,
            mean_depth=sum(k * count for k, count in self._counts.items()) / max(1, num_passes),
            shares={num: self._counts[num] / num_passes for num in sorted(self._counts)},
        )


class VerifyAll:
    """Drafts and verifies as much as the requests allow, and learns nothing."""

    def __init__(self) -> None:
        self._use = Use()

    def asks_free(self, num_rows: int) -> bool:
        """See `Policy`."""
        return True

    def limit(
        self, rows: Sequence[Row], num_other_rows: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """See `Policy`."""
        return list(rows)

    def choose(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Proposal]:
        """See `Policy`."""
        self._use.count(proposals)
        return list(proposals)

    def record(self, outcomes: Sequence[Outcome], seconds: Mapping[Phase, float]) -> None:
        """See `Policy`."""

    def close(self, key: int) -> None:
        """See `Policy`."""

    def summary(self) -> DepthUse:
        """See `Policy`."""
        return self._use.summary()
