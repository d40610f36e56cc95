"""What errors say."""

import pytest

from blockdraft.core.errors import reason_of, why_unread


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("a\n  b"), "a b"), (ValueError(), "ValueError"), (KeyError("a"), "'a'")],
)
def test_the_reason_is_one_line_and_never_empty(error, reason):
    assert reason_of(error) == reason


def test_why_a_file_cannot_be_read_does_not_repeat_its_name(tmp_path):
    with pytest.raises(OSError, match="absent") as caught:
        (tmp_path / "absent").read_text()
    assert why_unread(caught.value) == "No such file or directory"
    assert why_unread(ValueError("line 1:\n bad")) == "line 1: bad"
