"""What errors say."""

import pytest

from blockdraft.core.errors import reason_of


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("a\n  b"), "a b"), (ValueError(), "ValueError"), (KeyError("a"), "'a'")],
)
def test_the_reason_is_one_line_and_never_empty(error, reason):
    assert reason_of(error) == reason
