"""The fuzz goes on behind a case that ends its process, and names it."""

import pytest

from tests.fuzz import fuzzer, settings
from tests.fuzz.cases import GENERATORS
from tests.fuzz.fuzzer import fuzz

_NAMES_A_CASE = """
import json, os, sys, time
index = int(sys.argv[sys.argv.index("--first") + 1])
print(json.dumps({"case": 7 + index, "index": index}), flush=True)
"""
CRASH, HANG = _NAMES_A_CASE + "os.abort()", _NAMES_A_CASE + "time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "how"),
    [(CRASH, "ended with -6"), (HANG, "took more than 3 seconds")],
    ids=["crash", "hang"],
)
def test_a_case_that_ends_its_process_is_named(
    program: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.SECONDS, "60")
    monkeypatch.setattr(fuzzer, "HANGS_AFTER", 3.0)
    monkeypatch.setattr(fuzzer, "MAX_FAILURES", 2)
    findings = fuzz("shapes", 0, ("-c", program))
    assert len(findings.failures) == 2
    for seed, failure in zip((7, 8), findings.failures, strict=True):
        assert f"tests.fuzz.run shapes --case {seed}" in failure
        assert how in failure


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_a_seed_gives_its_case_again(name: str) -> None:
    cases = [GENERATORS[name](seed) for seed in range(20)]
    assert repr(cases) == repr([GENERATORS[name](seed) for seed in range(20)])
    assert len(set(map(repr, cases))) == len(cases)
