"""The table of families in the docs says what runs of tiny models show."""

import pytest

from blockdraft.kernels.cpu.library import library
from tools import families

QUICK = ("Qwen3", "Qwen3_5", "Mamba")
"""One of each path."""


def documented() -> dict[str, str]:
    return families.documented(families.PAGE.read_text(encoding="utf-8"))


def check(family: str) -> None:
    expected = documented()[family]
    if library() is None:  # then no kernel steps, and states are copied
        kept = "the anchor's states, inputs of each candidate"
        expected = expected.replace(kept, "a copy of the states for each candidate")
    assert families.examine(family).found == expected


def test_every_family_has_its_row() -> None:
    assert sorted(documented()) == sorted(families.families())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", QUICK)
def test_the_table_says_what_is_found(family: str) -> None:
    check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.families() if name not in QUICK])
def test_the_table_says_what_is_found_of_all_others(family: str) -> None:
    check(family)


def test_an_output_that_says_too_little_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "MIN_DISTINCT", 98)
    with pytest.raises(AssertionError, match="distinct tokens say little"):
        families.examine("Qwen3")
