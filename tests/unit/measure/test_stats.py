import pytest

from blockdraft.core.plan import Proposal, Tree
from blockdraft.measure.acceptance import AcceptanceStats

PASSES = [(4, 3, 3), (1, 3, 0), (2, 3, 2), (1, 0, 0)]
"""Tokens, candidates and kept ones of chains. The third was cut at a stop."""


def record_chain(stats: AcceptanceStats, num_tokens: int, num_drafted: int, kept: int) -> None:
    stats.record(num_tokens, Proposal.chain([0] * num_drafted, "test"), range(kept))


def make_stats() -> AcceptanceStats:
    stats = AcceptanceStats()
    for one in PASSES:
        record_chain(stats, *one)
    return stats


def test_the_counts_follow_their_definitions() -> None:
    stats = make_stats()
    assert stats.num_passes == 4
    assert stats.num_tokens == sum(size * count for size, count in stats.histogram.items()) == 8
    assert sum(stats.histogram.values()) == stats.num_passes
    assert stats.acceptance_length == 2.0
    assert stats.acceptance_rate == pytest.approx(5 / 9)
    assert stats.per_position == pytest.approx([2 / 3, 2 / 3, 1 / 3])


def test_nothing_recorded_gives_zeros() -> None:
    stats = AcceptanceStats()
    assert (stats.acceptance_length, stats.acceptance_rate, stats.per_position) == (0.0, 0.0, [])


def test_adding_is_recording_both() -> None:
    both, twice = make_stats(), make_stats()
    both.add(make_stats())
    for one in PASSES:
        record_chain(twice, *one)
    assert both == twice
    assert both.to_dict()["histogram"] == {"1": 4, "2": 2, "4": 2}
    assert both.to_dict()["num_accepted"] == 10


SOURCES = ("dflash", "dflash+lookup", "lookup", "dflash", "dflash")
PROPOSAL = Proposal(Tree((5, 6, 7, 8, 9), (-1, -1, 1, 1, 3)), (0.5,) * 5, SOURCES)
"""Two first tokens; behind the second two more, and behind the second of them one."""


def test_trees_are_counted_by_depth_and_rank() -> None:
    stats = AcceptanceStats()
    stats.record(4, PROPOSAL, [1, 3, 4])
    stats.record(2, PROPOSAL, [0])
    stats.record(1, PROPOSAL, [])
    assert stats.drafted_at == {(0, 0): 3, (0, 1): 3, (1, 0): 3, (1, 1): 3, (2, 0): 3}
    assert stats.accepted_at == {(0, 0): 1, (0, 1): 1, (1, 1): 1, (2, 0): 1}
    # A depth counts once, however many candidates it has.
    assert stats.drafted == {0: 3, 1: 3, 2: 3}
    assert stats.accepted == {0: 2, 1: 1, 2: 1}
    assert stats.per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert stats.per_rank == pytest.approx({0: 2 / 9, 1: 2 / 6})
    assert stats.outcomes == {(5, 3): 1, (5, 1): 1, (5, 0): 1}
    assert (stats.num_drafted, stats.num_accepted, stats.mean_depth) == (15, 4, 3.0)
    assert stats.num_passes_of_depth == {3: 3}
    # The longest path has three of the five candidates.
    assert stats.mean_drafted == 5.0
    assert stats.to_dict()["per_rank"] == {"0": pytest.approx(2 / 9), "1": pytest.approx(1 / 3)}


def test_candidates_are_counted_by_those_who_proposed_them() -> None:
    stats = AcceptanceStats()
    stats.record(4, PROPOSAL, [1, 3, 4])
    stats.record(1, PROPOSAL, [])
    assert stats.drafted_by == {"dflash": 6, "dflash+lookup": 2, "lookup": 2}
    assert stats.accepted_by == {"dflash": 2, "dflash+lookup": 1}
    assert stats.to_dict()["per_source"] == {
        "dflash": {"num_drafted": 6, "num_accepted": 2},
        "dflash+lookup": {"num_drafted": 2, "num_accepted": 1},
        "lookup": {"num_drafted": 2, "num_accepted": 0},
    }


def test_chains_have_one_rank() -> None:
    stats = make_stats()
    assert stats.per_rank == {0: pytest.approx(5 / 9)}
    assert stats.num_passes_of_depth == {0: 1, 3: 3}
