"""What was drafted, what was kept. Each metric is defined here, once."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from blockdraft.core.plan import Proposal


@dataclass(slots=True)
class AcceptanceStats:
    """Counts over decoding passes: target passes over an anchor. Prompt passes do not count.

    One that computes a preempted sequence again does, as a pass without drafts, for its token comes
    behind others. The ledger and `explain` have it among the prompts'.

    tau, the acceptance length, is tokens committed per pass, the bonus included, tokens cut off
    behind a stop excluded. Drafts behind a stop were checked and not kept. `histogram[k]` is the
    number of passes that committed k tokens. `drafted[i]` and `accepted[i]` count how often depth i
    (from 0) held candidates, and how often one was kept; their ratio is the acceptance rate of the
    position. `drafted_at[i, r]` and `accepted_at[i, r]` count the candidates of rank r among their
    siblings there. `outcomes[d, a]` is the number of passes that verified d candidates and kept a
    path of a. `drafted_by[source]` and `accepted_by[source]` count candidates by who proposed them,
    several drafters included.
    """

    num_passes: int = 0
    num_tokens: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[tuple[int, int]] = field(default_factory=Counter)
    accepted_at: Counter[tuple[int, int]] = field(default_factory=Counter)
    outcomes: Counter[tuple[int, int]] = field(default_factory=Counter)
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)

    def record(self, num_tokens: int, proposal: Proposal, nodes: Sequence[int]) -> None:
        """Count one pass: what it committed, what it verified, and the path that was kept."""
        tree = proposal.tree
        self.num_passes += 1
        self.num_tokens += num_tokens
        self.histogram[num_tokens] += 1
        self.outcomes[len(tree), len(nodes)] += 1
        # Counted one by one: for a handful of places `update` takes several times as long.
        for depth in range(max(tree.depths, default=0)):
            self.drafted[depth] += 1
        places = [(depth - 1, rank) for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
        for place in places:
            self.drafted_at[place] += 1
        for depth, node in enumerate(nodes):
            self.accepted[depth] += 1
            self.accepted_at[places[node]] += 1
            self.accepted_by[proposal.sources[node]] += 1
        for source in proposal.sources:
            self.drafted_by[source] += 1

    def add(self, other: "AcceptanceStats") -> None:
        """Add another sequence's counts."""
        self.num_passes += other.num_passes
        self.num_tokens += other.num_tokens
        self.histogram.update(other.histogram)
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
        self.drafted_at.update(other.drafted_at)
        self.accepted_at.update(other.accepted_at)
        self.outcomes.update(other.outcomes)
        self.drafted_by.update(other.drafted_by)
        self.accepted_by.update(other.accepted_by)

    @property
    def acceptance_length(self) -> float:
        """tau; 0 if no pass was made."""
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def num_drafted(self) -> int:
        """Candidates that were verified."""
        return self.drafted_at.total()

    @property
    def num_accepted(self) -> int:
        """Candidates that were kept."""
        return self.accepted_at.total()

    @property
    def acceptance_rate(self) -> float:
        """Kept over verified candidates; 0 if nothing was drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    @property
    def mean_depth(self) -> float:
        """Longest path per pass; 0 if no pass was made."""
        return self.drafted.total() / self.num_passes if self.num_passes else 0.0

    @property
    def mean_drafted(self) -> float:
        """Candidates per pass; 0 if no pass was made."""
        return self.num_drafted / self.num_passes if self.num_passes else 0.0

    @property
    def num_passes_of_depth(self) -> dict[int, int]:
        """How many passes had a longest path of each depth; depths that never occurred are absent.

        Of a chain that is the number of drafted tokens, of a tree it is less.
        """
        # drafted[i] counts the passes whose longest path is above i.
        deepest = len(self.drafted)
        at_least = [self.num_passes, *(self.drafted[i] for i in range(deepest)), 0]
        counts = {depth: at_least[depth] - at_least[depth + 1] for depth in range(deepest + 1)}
        return {depth: count for depth, count in counts.items() if count}

    @property
    def per_position(self) -> list[float]:
        """Acceptance rate of each slot: kept over drafted."""
        return [self.accepted[i] / self.drafted[i] for i in sorted(self.drafted)]

    @property
    def per_node(self) -> dict[tuple[int, int], float]:
        """Share of the candidates at each depth, from 0, and rank there that were kept."""
        return {
            place: self.accepted_at[place] / number
            for place, number in sorted(self.drafted_at.items())
        }

    @property
    def per_rank(self) -> dict[int, float]:
        """Share of the candidates of each rank among their siblings that were kept."""
        drafted: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for (_, rank), number in self.drafted_at.items():
            drafted[rank] += number
        for (_, rank), number in self.accepted_at.items():
            accepted[rank] += number
        return {rank: accepted[rank] / drafted[rank] for rank in sorted(drafted)}

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "per_position": self.per_position,
            "per_rank": {str(rank): rate for rank, rate in self.per_rank.items()},
            "per_source": {
                name: {"num_drafted": num, "num_accepted": self.accepted_by[name]}
                for name, num in sorted(self.drafted_by.items())
            },
            "mean_depth": self.mean_depth,
            "num_passes_of_depth": {str(k): n for k, n in self.num_passes_of_depth.items()},
            "histogram": {str(k): self.histogram[k] for k in sorted(self.histogram)},
            "num_passes": self.num_passes,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
        }
