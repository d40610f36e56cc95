"""Many prompts: which kinds of them lose, by how much, with examples."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.core.grouping import grouped
from blockdraft.diagnose.explain.round import Cause, Rejection
from blockdraft.diagnose.explain.run import Explanation
from blockdraft.diagnose.explain.stream import Streams, longest_rejected_run, rate_of
from blockdraft.diagnose.explain.sums import Sums, sum_all

NUM_EXAMPLES = 3
_CONTEXT = 60
"""Characters of the output in front of an example."""


@dataclass(frozen=True, slots=True)
class Explained:
    """One prompt of a run. `streams` are None unless the streaming was timed."""

    id: str
    category: str
    explanation: Explanation
    streams: Streams | None = None

    def to_dict(self, stall_limit: float | None) -> dict[str, Any]:
        """Plain values for JSON."""
        explanation = self.explanation
        return {
            "id": self.id,
            "category": self.category,
            **explanation.to_dict(),
            "longest_rejected_run": longest_rejected_run(explanation.rounds),
            "streams": None if self.streams is None else self.streams.to_dict(stall_limit),
        }


@dataclass(frozen=True, slots=True)
class Example:
    """A rejection in its place: the text before it, what was drafted, and what came instead."""

    id: str
    context: str
    drafted: str
    wanted: str | None
    cause: Cause
    drafter_rank: int | None
    target_probability: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """The prompts of one category.

    behind: tau of all prompts together less that of these; above 0 they lose. speedup: tokens per
    second of drafted over plain, both summed over the prompts; None unless the streaming was timed.
    speedup_ends: the lowest and the highest of the prompts.
    """

    category: str
    num_prompts: int
    sums: Sums
    behind: float
    speedup: float | None
    speedup_ends: tuple[float, float] | None
    examples: tuple[Example, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "category": self.category,
            "num_prompts": self.num_prompts,
            "behind": self.behind,
            "speedup": self.speedup,
            "speedup_ends": self.speedup_ends,
            "sums": self.sums.to_dict(),
            "examples": [
                {name: getattr(example, name) for name in Example.__slots__}
                for example in self.examples
            ],
        }


def main_kind(explanation: Explanation) -> str:
    """The kind that most tokens of an output have: the category of a prompt that names none."""
    counts = Counter(explanation.kinds)
    return f"mostly {counts.most_common(1)[0][0]}" if counts else "empty"


def group_prompts(prompts: Sequence[Explained]) -> list[Group]:
    """One group a category, the one that loses most first."""
    overall = sum_all(one.explanation.sums for one in prompts).acceptance_length
    members = grouped(prompts, lambda one: one.category)
    groups = [_group(category, own, overall) for category, own in members.items()]
    return sorted(groups, key=lambda group: group.behind, reverse=True)


def _group(category: str, prompts: Sequence[Explained], overall: float) -> Group:
    sums = sum_all(one.explanation.sums for one in prompts)
    streams = [one.streams for one in prompts if one.streams is not None]
    each = [one.speedup for one in streams]
    return Group(
        category=category,
        num_prompts=len(prompts),
        sums=sums,
        behind=overall - sums.acceptance_length,
        speedup=_speedup(streams),
        speedup_ends=(min(each), max(each)) if each else None,
        examples=_examples(prompts, sums),
    )


def _speedup(streams: Sequence[Streams]) -> float | None:
    # First bursts, which are left out with the prompts' passes, are longer with drafts: the tokens
    # behind them are not the same.
    plain = rate_of(one.plain for one in streams)
    return rate_of(one.drafted for one in streams) / plain if plain else None


def _examples(prompts: Sequence[Explained], sums: Sums) -> tuple[Example, ...]:
    """One rejection of the commonest cause from each of the worst prompts, early in its block."""
    if not sums.total.num_rejected:
        return ()
    cause = sums.total.causes.most_common(1)[0][0]
    examples: list[Example] = []
    for one in sorted(prompts, key=lambda one: one.explanation.sums.acceptance_length):
        found = [
            (one_round.rejection.slot, one_round.start, one_round.rejection)
            for one_round in one.explanation.rounds
            if one_round.rejection is not None and one_round.rejection.cause == cause
        ]
        if found and len(examples) < NUM_EXAMPLES:
            slot, start, rejection = min(found, key=lambda item: item[:2])
            examples.append(_example(one, start + slot, rejection))
    return tuple(examples)


def _example(one: Explained, place: int, rejection: Rejection) -> Example:
    labels, evidence = one.explanation.labels, rejection.evidence
    return Example(
        id=one.id,
        context="".join(one.explanation.pieces[:place])[-_CONTEXT:],
        drafted=labels[rejection.drafted_id],
        wanted=None if evidence is None else labels[evidence.wanted_id],
        cause=rejection.cause,
        drafter_rank=None if evidence is None else evidence.drafter_rank,
        target_probability=None if evidence is None else evidence.target_probability,
    )
