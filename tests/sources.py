"""Counts of drafted tokens by one kind of drafter, alone or beside others."""

from collections import Counter

from blockdraft.measure.acceptance import AcceptanceStats
from blockdraft.speculate.merge import sources_of


def num_drafted_by(stats: AcceptanceStats, kind: str) -> int:
    """Verified candidates that it proposed."""
    return _num_by(stats.drafted_by, kind)


def num_accepted_by(stats: AcceptanceStats, kind: str) -> int:
    """Of those the ones that were kept."""
    return _num_by(stats.accepted_by, kind)


def _num_by(counts: Counter[str], kind: str) -> int:
    return sum(num for name, num in counts.items() if kind in sources_of(name))
