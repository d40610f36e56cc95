"""Models of random shapes: drafted together, they give the bits of lone plain decoding."""

from collections.abc import Callable

import pytest

from tests.fuzz import faults
from tests.fuzz.cases import Case
from tests.fuzz.checks import check_findings, find, smoke
from tests.fuzz.fuzzer import fuzz


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_random_shapes(part: int, record_property: Callable[[str, object], None]) -> None:
    check_findings(fuzz("shapes", part), record_property)


def test_a_few_random_shapes() -> None:
    smoke("shapes", num_cases=6)


def is_sequential(case: Case) -> bool:
    return case.model.way == "sequential" and case.engine.drafter == "oracle"


def is_paged(case: Case) -> bool:
    return case.model.way == "paged" and case.engine.drafter == "oracle"


def drafts_wide(case: Case) -> bool:
    return case.engine.drafter == "oracle" and max(r.params.max_tokens for r in case.requests) > 60


def has_a_window(case: Case) -> bool:
    shape = case.model
    return (
        shape.way == "paged"
        and shape.kind in ("mistral", "gemma3")
        and shape.dtype != "bfloat16"
        and shape.bad_embedding is None
        and max(len(request.prompt) for request in case.requests) > shape.window
    )


@pytest.mark.parametrize(
    ("fault", "fits", "found"),
    [
        (faults.rollback_one_too_short, is_sequential, "token_ids|logits|keys"),
        (faults.stale_key_in_a_kept_slot, is_paged, "token_ids|logits|keys"),
        (faults.row_depends_on_company, drafts_wide, "token_ids|logits|keys"),
        (faults.window_one_key_too_wide, has_a_window, "not what transformers computes"),
    ],
)
def test_it_finds(fault: faults.Fault, fits: Callable[[Case], bool], found: str) -> None:
    assert any(word in find(fault, "shapes", fits) for word in found.split("|"))
