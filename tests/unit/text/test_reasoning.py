import random

import pytest

from blockdraft.text.reasoning import ReasoningSplitter

TEXTS = [
    ("<think>\none two\n</think>\n\nthree\n", False, "one two", "three\n"),
    ("\n<think>one</think>", False, "one", ""),
    ("one </think> two </think> three", True, "one", "two </think> three"),
    ("no <think>one</think>", False, "", "no <think>one</think>"),
    ("  plain ", False, "", "  plain "),
    ("<thin", False, "", "<thin"),
    ("<think>never </thin  ", False, "never </thin  ", ""),
    ("<think></think>x", False, "", "x"),
    ("<think> \n </think> \n ", False, "", ""),
    ("a < b </ c </think>d", True, "a < b </ c", "d"),
    ("  ", False, "", "  "),
    ("", True, "", ""),
    ("<think>\none</think>two", True, "one", "two"),
    ("\n<thin", True, "<thin", ""),
    ("<this</think>", True, "<this", ""),
    ("one <think>two</think>three", True, "one <think>two", "three"),
]


def split(pieces, begun):
    splitter, found = ReasoningSplitter(begun=begun), {"reasoning": "", "content": ""}
    for parts in [*map(splitter.feed, pieces), splitter.close()]:
        for kind, text in parts:
            assert text
            found[kind] += text
    return found["reasoning"], found["content"]


@pytest.mark.parametrize(("text", "begun", "reasoning", "content"), TEXTS)
def test_parts_do_not_depend_on_the_pieces(text, begun, reasoning, content):
    assert split([text], begun) == (reasoning, content)
    assert split(list(text), begun) == (reasoning, content)
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, begun) == (reasoning, content)


def test_content_is_not_held_back():
    splitter = ReasoningSplitter(begun=False)
    assert splitter.feed("abc") == [("content", "abc")]
    assert splitter.feed(" ") == [("content", " ")]
