"""What a proof has found, filled while it runs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.core.words import counted
from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.proof.agreement import Agreement
from blockdraft.proof.cases import Case, Cases
from blockdraft.proof.context import ContextCheck
from blockdraft.proof.controls import ControlResult
from blockdraft.proof.differences import Difference
from blockdraft.proof.distribution import DistributionCheck
from blockdraft.proof.forced import Noise
from blockdraft.proof.ways import Output, Way
from blockdraft.speculate.merge import sources_of

ProofVerdict = Literal["proven", "no-violation", "failed", "partial"]


@dataclass(frozen=True, slots=True)
class WayCheck:
    """All cases of one way against plain decoding; `differences` holds the first of each output.

    lacks: see `lacks_of`.
    """

    way: Way
    num_cases: int
    num_tokens: int
    differences: tuple[Difference, ...]
    acceptance: AcceptanceStats
    lacks: tuple[str, ...] = ()

    @property
    def num_failures(self) -> int:
        """Differences that are no near-ties."""
        return sum(difference.is_failure for difference in self.differences)


@dataclass(slots=True)
class Findings:
    """Everything that is known so far. `is_whole` when nothing is left to do."""

    chosen: Cases
    plain: dict[Case, Output] = field(default_factory=dict)
    ways: list[WayCheck] = field(default_factory=list)
    contexts: list[ContextCheck] = field(default_factory=list)
    noise: Noise | None = None
    controls: list[ControlResult] = field(default_factory=list)
    distributions: list[DistributionCheck] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)
    seconds: float = 0.0
    is_whole: bool = False

    @property
    def failures(self) -> list[str]:
        """What speaks against the pair, or against the proof itself; one line each."""
        return [
            *(f"{c.num_failures} outputs differ {c.way.name}" for c in self.ways if c.num_failures),
            *(f"{check.way.name}: {lack}" for check in self.ways for lack in check.lacks),
            *(f"draft context of {c.case_id} is wrong" for c in self.contexts if not c.is_right),
            *(f"fault not caught: {c.name}" for c in self.controls if c.is_failure),
            *(f"distribution {c.name} is wrong" for c in self.distributions if not c.is_right),
        ]

    @property
    def verdict(self) -> ProofVerdict:
        """A failure is one also if the proof was interrupted. With exact off nothing is proven."""
        if self.failures:
            return "failed"
        if not self.is_whole:
            return "partial"
        return "proven" if self.noise is None else "no-violation"


def lacks_of(
    way: Way,
    outputs: Mapping[Case, Output],
    num_failed: int,
    *,
    num_preempted: int,
    model_kind: str,
    takes_over: bool,
) -> tuple[str, ...]:
    """What a way was to do and has not done: it has then compared plain decoding with itself.

    num_failed: how often a drafter failed, whose proposals are dropped. model_kind: of the drafter
    that is proven; others are often sure enough to be taken instead, but for lookup. takes_over:
    whether the target always goes on behind what an earlier request has computed.
    """
    acceptance, found = total_acceptance(outputs.values()), []
    if way.preempts and acceptance.num_passes and not num_preempted:
        found.append("nothing was preempted")
    if num_failed:
        found.append(f"the drafter failed {counted(num_failed, 'time')}")
    undrafted = [] if way.depth == "adaptive" else _undrafted_kinds(outputs)
    if undrafted and not acceptance.num_drafted:
        found.append("nothing was drafted")
    else:
        found += [f"nothing was drafted in {kind} requests" for kind in undrafted]
        drafters = {kind for source in acceptance.drafted_by for kind in sources_of(source)}
        if way.looks_up and acceptance.num_passes and model_kind not in drafters:
            found.append(f"nothing was drafted by {model_kind}")
    is_taken = any(sample.num_reused for output in outputs.values() for sample in output)
    if way.from_memory and not way.together and takes_over and outputs and not is_taken:
        found.append("no prompt was reused")
    return tuple(found)


def _undrafted_kinds(outputs: Mapping[Case, Output]) -> list[str]:
    """Of greedy and sampled requests those that decoded, and for which nothing was drafted.

    They are drafted by different code, so neither proves anything about the other.
    """
    found = []
    for kind, is_sampled in (("greedy", False), ("sampled", True)):
        of_kind = [out for case, out in outputs.items() if case.params.is_sampled == is_sampled]
        acceptance = total_acceptance(of_kind)
        if acceptance.num_passes and not acceptance.num_drafted:
            found.append(kind)
    return found


def total_acceptance(outputs: Iterable[Output]) -> AcceptanceStats:
    """Counts over all samples."""
    total = AcceptanceStats()
    for output in outputs:
        for sample in output:
            total.add(sample.acceptance)
    return total
