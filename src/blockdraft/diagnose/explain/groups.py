"""Many prompts: which kinds of them lose, by how much, with examples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdraft.core.grouping import grouped
from blockdraft.diagnose.explain.round import Cause, Rejection
from blockdraft.diagnose.explain.run import Explanation
from blockdraft.diagnose.explain.stream import (
    Later,
    Streams,
    longest_rejected_run,
    speedup_of,
)
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

    @property
    def summary(self) -> "Summary":
        """What is kept of it among many."""
        explanation, streams = self.explanation, self.streams
        completion, timed, differs = explanation.completion, None, False
        if streams is not None:
            timed = streams.drafted.later, streams.plain.later
            outputs = {streams.drafted.token_ids, streams.plain.token_ids}
            differs = outputs != {completion.token_ids}
        return Summary(
            id=self.id,
            category=self.category,
            sums=explanation.sums,
            examples=_examples(self),
            timed=timed,
            differs=differs,
            error=completion.error,
        )


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
class Summary:
    """What is kept of a prompt among many, whose rounds would fill the memory.

    examples: for each cause the rejection that was earliest in its block. timed: what came with
    drafts, and without; None unless the streaming was timed. differs: the tokens were not the same
    recorded, drafted and plain, as far as streamed. error: why the answer ended, if by one.
    """

    id: str
    category: str
    sums: Sums
    examples: Mapping[Cause, Example]
    timed: tuple[Later, Later] | None
    differs: bool
    error: str | None


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


def group_prompts(prompts: Sequence[Summary]) -> list[Group]:
    """One group a category, the one that loses most first."""
    overall = sum_all(one.sums for one in prompts).acceptance_length
    members = grouped(prompts, lambda one: one.category)
    groups = [_group(category, own, overall) for category, own in members.items()]
    return sorted(groups, key=lambda group: group.behind, reverse=True)


def _group(category: str, prompts: Sequence[Summary], overall: float) -> Group:
    sums = sum_all(one.sums for one in prompts)
    timed = [one.timed for one in prompts if one.timed is not None]
    each = [speedup_of([drafted], [plain]) for drafted, plain in timed]
    whole = speedup_of([drafted for drafted, _ in timed], [plain for _, plain in timed])
    return Group(
        category=category,
        num_prompts=len(prompts),
        sums=sums,
        behind=overall - sums.acceptance_length,
        speedup=whole or None,  # 0: every answer came at once
        speedup_ends=(min(each), max(each)) if timed else None,
        examples=_worst(prompts, sums),
    )


def _worst(prompts: Sequence[Summary], sums: Sums) -> tuple[Example, ...]:
    """One rejection of the commonest cause from each of the worst prompts."""
    if not sums.total.num_rejected:
        return ()
    cause = sums.total.causes.most_common(1)[0][0]
    by_tau = sorted(prompts, key=lambda one: one.sums.acceptance_length)
    return tuple(one.examples[cause] for one in by_tau if cause in one.examples)[:NUM_EXAMPLES]


def _examples(one: Explained) -> dict[Cause, Example]:
    """Of each cause the rejection that was earliest in its block."""
    earliest: dict[Cause, tuple[int, int, Rejection]] = {}
    for one_round in one.explanation.rounds:
        if (rejection := one_round.rejection) is not None:
            found = (rejection.slot, one_round.start, rejection)
            best = earliest.setdefault(rejection.cause, found)
            if found[:2] < best[:2]:
                earliest[rejection.cause] = found
    return {
        cause: _example(one, start + slot, rejection)
        for cause, (slot, start, rejection) in earliest.items()
    }


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
