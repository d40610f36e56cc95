"""Batches of random requests: they come, go, and wait for memory, and each has its lone answer."""

from collections.abc import Callable

import pytest

from tests.fuzz import faults
from tests.fuzz.cases import Case
from tests.fuzz.checks import check_findings, find, smoke, smoke_of
from tests.fuzz.fuzzer import fuzz
from tests.parity import faults as parity_faults


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_random_requests(part: int, record_property: Callable[[str, object], None]) -> None:
    check_findings(fuzz("requests", part), record_property)


def test_a_few_random_requests() -> None:
    smoke("requests", num_cases=3)


@pytest.mark.parametrize("drafter", ["dflash2", "dspark", "domino", "dfly", "dflare"])
def test_a_few_requests_with(drafter: str) -> None:
    smoke_of("requests", lambda case: case.engine.drafter == drafter, num_cases=1)


def any_case(case: Case) -> bool:
    return True


def is_paged(case: Case) -> bool:
    return case.model.way == "paged"


def aborts(case: Case) -> bool:
    return is_paged(case) and any(request.aborted_after for request in case.requests)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("fault", "fits"),
    [
        (faults.stale_key_in_a_kept_slot, is_paged),
        (faults.abort_frees_a_page_of_another, aborts),
        (faults.branches_see_the_first_path, is_paged),
        (faults.kept_path_stays, is_paged),
        (parity_faults.noise_by_slot, any_case),
    ],
)
def test_it_finds(fault: faults.Fault, fits: Callable[[Case], bool]) -> None:
    assert find(fault, "requests", fits)
