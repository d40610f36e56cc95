"""What is asserted of a run of the fuzz, and the search for a planted fault."""

import warnings
from collections.abc import Callable, Iterator
from itertools import count, islice

from tests.fuzz.cases import GENERATORS, MAX_DRAFT_TOKENS, Case
from tests.fuzz.faults import Fault
from tests.fuzz.fuzzer import Findings
from tests.fuzz.run import case_seed
from tests.fuzz.runner import Report, Tally, run_case
from tests.fuzz.settings import fuzz_seed

_SMOKE_SEED = 1
_FULL_COVERAGE_AFTER = 150
"""Cases after which every width and long outputs must have come up; a busy machine runs fewer. An
output is long in one case of 25, so a tenth of runs of 50 cases have none."""
_MOST_REFUSED = 0.2
"""Of the models, and a few by chance; each is told why. More, and the fuzz would look at little. On
CPUs with AVX-512, whose libraries choose by the number of rows, up to 15 in a hundred were refused.
"""


def check_findings(findings: Findings, record_property: Callable[[str, object], None]) -> None:
    """No difference, and enough was compared."""
    record_property("fuzz", findings.summary)
    assert not findings.failures, "\n\n".join(
        [f"{len(findings.failures)} cases of seed {fuzz_seed()} fail", *findings.failures]
    )
    tally = findings.tally
    assert tally.num_logits > 0, "nothing was compared"
    refused = sorted(set(findings.refusals))
    assert tally.num_refused <= 3 + _MOST_REFUSED * tally.num_cases, refused
    if tally.num_cases >= _FULL_COVERAGE_AFTER:
        check_compared(tally)
        missing = set(range(1, MAX_DRAFT_TOKENS + 2)) - tally.widths
        assert not missing, f"no verify had one of these widths: {sorted(missing)}"
        assert tally.num_long > 0, "no output was long"


def check_compared(tally: Tally) -> None:
    """Something was drafted, rejected and compared."""
    assert tally.num_cases > tally.num_refused
    assert tally.num_rejected > 0
    assert tally.num_drafted > tally.num_rejected
    assert len(tally.widths) > 8
    assert tally.num_logits > 0
    assert tally.num_keys > 0
    assert tally.num_against_stock > 0


def smoke(fuzz: str, num_cases: int) -> None:
    """The first short cases of a fixed seed, in this process."""
    tally = Tally()
    for case in islice(_short_cases(fuzz, lambda case: True), num_cases):
        report = _run(case)
        assert not report.wrong, f"case {case.seed}\n" + "\n".join(report.wrong)
        tally.add(report.tally)
    check_compared(tally)


def smoke_of(fuzz: str, fits: Callable[[Case], bool], num_cases: int) -> None:
    """Short cases of one sort: something is drafted, and nothing differs."""
    tally = Tally()
    for case in islice(_short_cases(fuzz, fits), num_cases):
        report = _run(case)
        assert not report.wrong, f"case {case.seed}\n" + "\n".join(report.wrong)
        tally.add(report.tally)
    assert tally.num_cases > tally.num_refused
    assert tally.num_drafted
    assert tally.num_logits


def find(fault: Fault, fuzz: str, fits: Callable[[Case], bool], num_cases: int = 10) -> str:
    """What the first case says that finds a planted fault, and that passes without it."""
    for case in islice(_short_cases(fuzz, fits), num_cases):
        with fault():
            report = _run(case)
        if report.wrong:
            assert not _run(case).wrong, f"case {case.seed} fails without the fault too"
            return report.wrong[0]
    raise AssertionError(f"{num_cases} cases did not find it")


def _short_cases(fuzz: str, fits: Callable[[Case], bool]) -> Iterator[Case]:
    """Those that take well under a second, on one thread."""
    for index in count():
        case = GENERATORS[fuzz](case_seed(_SMOKE_SEED, 0, index))
        shape, requests = case.model, case.requests
        num_asked = sum(one.params.max_tokens * one.params.n for one in requests)
        num_prompt = sum(len(one.prompt) * one.params.n for one in requests)
        is_small = shape.hidden_size <= 130 and shape.num_heads <= 9 and not shape.is_moe
        is_short = num_asked < 200 and num_prompt < 1000
        if is_small and is_short and shape.num_threads == 1 and fits(case):
            yield case


def _run(case: Case) -> Report:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run_case(case)
