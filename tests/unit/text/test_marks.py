"""The begin of a mark at the end of a text."""

import pytest

from blockdraft.text.marks import num_begun


@pytest.mark.parametrize(
    ("text", "marks", "num"),
    [
        ("", ["<end>"], 0),
        ("abc", ["<end>"], 0),
        ("abc<", ["<end>"], 1),
        ("abc<en", ["<end>"], 3),
        ("<en d", ["<end>"], 0),
        ("a<<", ["<end>", "<<<"], 2),
        ("a\n</e", ["\n</end>", "</end>"], 4),
        ("abc", [""], 0),
    ],
)
def test_the_longest_begin_counts(text, marks, num):
    assert num_begun(text, *marks) == num
