"""Models of random shapes: drafted together, they give the bits of lone plain decoding."""

import re
from collections.abc import Callable

import pytest

from tests.fuzz import faults
from tests.fuzz.cases import Case
from tests.fuzz.checks import check_findings, find, smoke, smoke_of
from tests.fuzz.fuzzer import fuzz
from tests.parity.faults import window_one_key_too_wide


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_random_shapes(part: int, record_property: Callable[[str, object], None]) -> None:
    check_findings(fuzz("shapes", part), record_property)


def test_a_few_random_shapes() -> None:
    smoke("shapes", num_cases=6)


@pytest.mark.parametrize("drafter", ["dflash2", "dspark", "domino", "dfly", "dflare"])
def test_a_few_shapes_with(drafter: str) -> None:
    smoke_of("shapes", lambda case: case.engine.drafter == drafter, num_cases=2)


def errs(case: Case) -> bool:
    """Some of what it drafts is kept and some is not, on the kernels, which are fast."""
    return (
        case.engine.drafter == "oracle"
        and case.engine.accuracies not in ((0.0,), (1.0,))
        and case.model.has_kernels
    )


def is_sequential(case: Case) -> bool:
    return errs(case) and case.model.way == "sequential"


def is_paged(case: Case) -> bool:
    return errs(case) and case.model.way == "paged"


def drafts_wide(case: Case) -> bool:
    return errs(case) and max(request.params.max_tokens for request in case.requests) > 60


def has_a_window(case: Case) -> bool:
    shape = case.model
    return (
        shape.way == "paged"
        and shape.kind in ("mistral", "gemma3")
        and shape.dtype != "bfloat16"
        and shape.bad_embedding is None
        and max(len(request.prompt) for request in case.requests) > shape.window
    )


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("fault", "fits", "found"),
    [
        (faults.rollback_one_too_short, is_sequential, "token|logits|keys"),
        (faults.stale_key_in_a_kept_slot, is_paged, "token|logits|keys"),
        (faults.row_depends_on_company, drafts_wide, "token|logits|keys"),
        (window_one_key_too_wide, has_a_window, "not what transformers computes"),
    ],
)
def test_it_finds(fault: faults.Fault, fits: Callable[[Case], bool], found: str) -> None:
    assert re.search(found, find(fault, "shapes", fits))
