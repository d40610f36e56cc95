"""What was drafted, what was kept. Each metric is defined here, once."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class AcceptanceStats:
    """Counts over decoding passes: target passes over an anchor. Prompt passes do not count.

    tau, the acceptance length, is tokens committed per pass, the bonus included, tokens cut off
    behind a stop excluded. `histogram[k]` is the number of passes that committed k tokens.
    `drafted[i]` and `accepted[i]` count how often slot i (from 0) held a draft, and how often the
    target kept it; their ratio is the acceptance rate of the position. `outcomes[d, a]` is the
    number of passes that drafted d tokens of which a were kept.
    """

    num_passes: int = 0
    num_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def record(self, num_tokens: int, num_drafted: int, num_accepted: int) -> None:
        """Count one pass."""
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.histogram[num_tokens] += 1
        self.drafted.update(range(num_drafted))
        self.accepted.update(range(num_accepted))
        self.outcomes[num_drafted, num_accepted] += 1

    def add(self, other: "AcceptanceStats") -> None:
        """Add another sequence's counts."""
        self.num_passes += other.num_passes
        self.num_tokens += other.num_tokens
        self.histogram.update(other.histogram)
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.outcomes.update(other.outcomes)

    @property
    def acceptance_length(self) -> float:
        """tau; 0 if no pass was made."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        drafted = self.drafted.total()
        return self.accepted.total() / drafted if drafted else 0.0

    @property
    def mean_depth(self) -> float:
        """Drafted tokens per pass; 0 if no pass was made."""
        return self.drafted.total() / self.num_passes if self.num_passes else 0.0

    @property
    def num_passes_of_depth(self) -> dict[int, int]:
        """How many passes drafted as many tokens; depths that never occurred are absent."""
        # drafted[i] counts the passes that drafted more than i tokens.
        deepest = len(self.drafted)
        at_least = [self.num_passes, *(self.drafted[i] for i in range(deepest)), 0]
        counts = {depth: at_least[depth] - at_least[depth + 1] for depth in range(deepest + 1)}
        return {depth: count for depth, count in counts.items() if count}

    @property
    def per_position(self) -> list[float]:
        """Acceptance rate of each slot: kept over drafted."""
        return [self.accepted[i] / self.drafted[i] for i in sorted(self.drafted)]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "per_position": self.per_position,
            "mean_depth": self.mean_depth,
            "num_passes_of_depth": {str(k): n for k, n in self.num_passes_of_depth.items()},
            "histogram": {str(k): self.histogram[k] for k in sorted(self.histogram)},
            "num_passes": self.num_passes,
            "num_drafted": self.drafted.total(),
            "num_accepted": self.accepted.total(),
        }
