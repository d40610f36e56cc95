"""Who drafts, and which candidates are verified: what an allocator asks. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from blockdraft.core.plan import Proposal
from blockdraft.core.recorder import Phase
from blockdraft.core.sequence import Row

DEFAULT_NUM_DRAFT_TOKENS = 15
"""The most candidates of a sequence, unless told otherwise, where as many are verified as pay."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the target verified of a sequence, and the nodes of the path that it kept."""

    row: Row
    proposal: Proposal
    kept_nodes: Sequence[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """Who may propose in a step: drafters without a model, and the one that runs a model.

    is_watched: the policy wants to be asked on, and told what came of the step.
    """

    free: bool = False
    model: bool = False
    is_watched: bool = True

    @property
    def anybody(self) -> bool:
        """False in a step of plain decoding."""
        return self.free or self.model


class Policy(Protocol):
    """Is asked three questions in a step about its decoding rows, and told what came of it.

    The same history gives the same answers. "Free" is what is proposed without running a model.
    """

    def ask(self, num_sequences: int) -> Asked:
        """Who may propose in the next step, of so many decoding sequences; asked first.

        Nobody where the deciding alone would take longer than what is proposed saves. A step in
        which somebody may propose is watched.
        """
        ...

    def limit(
        self, rows: Sequence[Row], num_prompt_tokens: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """The rows, each with limits for what a model may propose: candidates, and their depth.

        num_prompt_tokens: of prompts in the same forward. free: what is proposed for each row
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


class VerifyAll:
    """Drafts and verifies as much as the requests allow, and learns nothing."""

    def ask(self, num_sequences: int) -> Asked:
        """See `Policy`."""
        return Asked(free=True, model=True)

    def limit(
        self, rows: Sequence[Row], num_prompt_tokens: int, free: Sequence[Proposal]
    ) -> list[Row]:
        """See `Policy`."""
        return list(rows)

    def choose(self, rows: Sequence[Row], proposals: Sequence[Proposal]) -> list[Proposal]:
        """See `Policy`."""
        return list(proposals)

    def record(self, outcomes: Sequence[Outcome], seconds: Mapping[Phase, float]) -> None:
        """See `Policy`."""

    def close(self, key: int) -> None:
        """See `Policy`."""
