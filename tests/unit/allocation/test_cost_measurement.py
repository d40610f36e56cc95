"""What is timed when an engine is loaded, on models that are tiny."""

from time import perf_counter

import pytest

from blockdraft.allocation import cost_measurement
from blockdraft.allocation.cost_measurement import measure_costs
from blockdraft.cache.pages import Pages
from blockdraft.models.target.paged import PagedTarget
from blockdraft.speculate.drafters.draft_model import DraftModelDrafter
from tests.parity.targets import WAYS, Way, make_dflash, make_target
from tests.tiny import VOCAB_SIZE, tiny_drafter, tiny_target

COMPILING = 1000.0
"""Seconds that a card takes for what it does for the first time."""


class Clock:
    """The time, ahead by what was pretended to take time."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return perf_counter() + self.ahead


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_for_the_first_projection_is_not_timed(way: Way, monkeypatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cost_measurement, "perf_counter", clock)
    target = make_target(way, tiny_target())
    drafter = make_dflash(target, tiny_drafter(block_size=8))
    write, sizes = drafter._write, set[int]()

    def compiled(piece) -> None:
        size = sum(map(len, piece))
        clock.ahead += 0.0 if size in sizes else COMPILING
        sizes.add(size)
        write(piece)

    monkeypatch.setattr(drafter, "_write", compiled)
    with target.released_after():
        costs = measure_costs(target, drafter)
    assert clock.ahead
    # Not more than nothing: on a busy machine more features may seem to take less time.
    assert 0.0 <= costs.project(100) < COMPILING / 10


def test_a_drafter_with_a_cache_of_its_own_computes_what_is_timed(monkeypatch) -> None:
    target = make_target("paged", tiny_target())
    own = PagedTarget(tiny_target(seed=1), Pages(65))
    drafter = DraftModelDrafter(own, VOCAB_SIZE)
    forward, prefilled = drafter._forward, list[int]()

    def counted(samples, new_ids, trees, line="draft"):
        if line == "draft_prefill":
            prefilled.append(len(new_ids[0]))
        return forward(samples, new_ids, trees, line)

    monkeypatch.setattr(drafter, "_forward", counted)
    with target.released_after(), own.released_after():
        measure_costs(target, drafter)
    first, timed = prefilled
    assert first == timed
