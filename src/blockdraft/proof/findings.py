"""What a proof has found, filled while it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.proof.agreement import Agreement
from blockdraft.proof.cases import Case, Cases
from blockdraft.proof.context import ContextCheck
from blockdraft.proof.controls import ControlResult
from blockdraft.proof.differences import Difference
from blockdraft.proof.distribution import DistributionCheck
from blockdraft.proof.forced import Noise
from blockdraft.proof.ways import Output, Way

ProofVerdict = Literal["proven", "failed", "partial"]


@dataclass(frozen=True, slots=True)
class WayCheck:
    """All cases of one way against plain decoding; `differences` holds the first of each output."""

    way: Way
    num_cases: int
    num_tokens: int
    differences: tuple[Difference, ...]
    acceptance: AcceptanceStats

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
            *(f"draft context of {c.case_id} is wrong" for c in self.contexts if not c.is_right),
            *(f"fault not caught: {c.name}" for c in self.controls if c.is_failure),
            *(f"distribution {c.name} is wrong" for c in self.distributions if not c.is_right),
        ]

    @property
    def verdict(self) -> ProofVerdict:
        """A failure is one also if the proof was interrupted."""
        if self.failures:
            return "failed"
        return "proven" if self.is_whole else "partial"


def total_acceptance(outputs: Sequence[Output]) -> AcceptanceStats:
    """Counts over all samples."""
    total = AcceptanceStats()
    for output in outputs:
        for sample in output:
            total.add(sample.acceptance)
    return total
