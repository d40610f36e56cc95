"""Sums over rounds: how drafts fared by kind of text, and by their place in the block."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockdraft.diagnose.explain.round import CAUSES, Cause, Round
from blockdraft.text.kinds import KINDS, Kind


@dataclass(slots=True)
class Tally:
    """Drafts that the target looked at: those kept, and the rejected ones by cause."""

    num_kept: int = 0
    causes: Counter[Cause] = field(default_factory=Counter)

    @property
    def num_rejected(self) -> int:
        """Rejections, one a round at most; each has one cause."""
        return self.causes.total()

    @property
    def num_tested(self) -> int:
        """Kept and rejected."""
        return self.num_kept + self.num_rejected

    @property
    def acceptance_rate(self) -> float:
        """Kept over tested, 0 if nothing was: the chance of a draft whose forerunners were kept."""
        return self.num_kept / self.num_tested if self.num_tested else 0.0

    def add(self, other: "Tally") -> None:
        """Add another tally."""
        self.num_kept += other.num_kept
        self.causes.update(other.causes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "num_tested": self.num_tested,
            "num_kept": self.num_kept,
            "num_rejected": self.num_rejected,
            "acceptance_rate": self.acceptance_rate,
            "causes": {cause: self.causes[cause] for cause in CAUSES},
        }


@dataclass(slots=True)
class Sums:
    """Counts over rounds, those of prompts left out; `num_tokens` leaves their tokens out too.

    by_kind: a kept draft counts for the kind of its token, a rejection for the kind of the token
    that came in its place (or that ended the answer before it). by_slot: from the first slot of the
    block. num_drafted: also what was behind a rejection, and so never looked at. num_beside:
    candidates of trees that stood beside these.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_beside: int = 0
    total: Tally = field(default_factory=Tally)
    by_kind: dict[Kind, Tally] = field(default_factory=dict)
    by_slot: list[Tally] = field(default_factory=list)

    @property
    def acceptance_length(self) -> float:
        """tau: tokens a round; 0 without rounds."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    def add(self, other: "Sums") -> None:
        """Add the sums of other rounds."""
        self.num_rounds += other.num_rounds
        self.num_tokens += other.num_tokens
        self.num_drafted += other.num_drafted
        self.num_beside += other.num_beside
        self.total.add(other.total)
        for kind, tally in other.by_kind.items():
            self.by_kind.setdefault(kind, Tally()).add(tally)
        for slot, tally in enumerate(other.by_slot):
            self._slot(slot).add(tally)

    def count(self, one: Round, kinds: Sequence[Kind]) -> None:
        """Count one round; `kinds` are those of all tokens of its output."""
        self.num_rounds += 1
        self.num_tokens += len(one.token_ids)
        self.num_drafted += len(one.drafted_ids)
        self.num_beside += one.num_beside
        for slot in range(one.num_kept):
            self._count(slot, kinds[one.start + slot], Tally(num_kept=1))
        if one.rejection is not None:
            last = one.start + len(one.token_ids) - 1
            self._count(
                one.rejection.slot, kinds[last], Tally(causes=Counter([one.rejection.cause]))
            )

    def _count(self, slot: int, kind: Kind, tally: Tally) -> None:
        self.total.add(tally)
        self.by_kind.setdefault(kind, Tally()).add(tally)
        self._slot(slot).add(tally)

    def _slot(self, slot: int) -> Tally:
        while len(self.by_slot) <= slot:
            self.by_slot.append(Tally())
        return self.by_slot[slot]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "num_rounds": self.num_rounds,
            "num_tokens": self.num_tokens,
            "num_drafted": self.num_drafted,
            "num_beside": self.num_beside,
            **self.total.to_dict(),
            "by_kind": {k: self.by_kind[k].to_dict() for k in KINDS if k in self.by_kind},
            "by_slot": [tally.to_dict() for tally in self.by_slot],
        }


def sum_rounds(rounds: Iterable[Round], kinds: Sequence[Kind]) -> Sums:
    """The sums of one output."""
    sums = Sums()
    for one in rounds:
        if not one.is_prompt:
            sums.count(one, kinds)
    return sums


def sum_all(parts: Iterable[Sums]) -> Sums:
    """The sums of several outputs together."""
    total = Sums()
    for part in parts:
        total.add(part)
    return total
