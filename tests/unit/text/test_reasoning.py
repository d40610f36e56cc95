import random

import pytest

from blockdraft.core.thinking import ALL_TAGS, THINK
from blockdraft.text.reasoning import ReasoningSplitter
from blockdraft.text.sent_back import as_sent_back
from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

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


ONE = (("<call>", "{"),)
NESTED = (("<call>", "<one>{"), ("<one>", "{"))
CALLS = [
    ("one \n<call>\n{two", True, "one", "<call>\n{two"),
    ("<think><call>{}", False, "", "<call>{}"),
    ("one <call>{two} </think>\n<call>{", True, "one <call>{two}", "<call>{"),
    ("one <call> two <call>three</think>{", True, "one <call> two <call>three", "{"),
    ("one <call> ", True, "one <call> ", ""),
    ("one <ca", True, "one <ca", ""),
    ("one <call><call>{", True, "one <call>", "<call>{"),
]


SEVERAL = [
    ("one <call>\n<one>{two", "one", "<call>\n<one>{two"),
    ("one <one> {two <call> <one>", "one", "<one> {two <call> <one>"),
    ("one <call> <one> two", "one <call> <one> two", ""),
]


def split(pieces, begun, calls=(), tags=THINK):
    splitter = ReasoningSplitter(begun=begun, calls=calls, tags=tags)
    found = {"reasoning": "", "content": ""}
    for parts in [*map(splitter.feed, pieces), splitter.close()]:
        for kind, text in parts:
            assert text
            found[kind] += text
    return found["reasoning"], found["content"]


@pytest.mark.parametrize(
    ("text", "begun", "reasoning", "content", "calls"),
    [
        *((*one, ()) for one in TEXTS),
        *((*one, ONE) for one in (*TEXTS, *CALLS)),
        *((text, True, *parts, NESTED) for text, *parts in SEVERAL),
    ],
)
def test_parts_do_not_depend_on_the_pieces(text, begun, reasoning, content, calls):
    assert split([text], begun, calls) == (reasoning, content)
    assert split(list(text), begun, calls) == (reasoning, content)
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert split(pieces, begun, calls) == (reasoning, content)


@pytest.mark.parametrize(("text", "begun", "reasoning", "content"), TEXTS)
def test_other_marks_part_the_same(text, begun, reasoning, content):
    def other(one):
        return one.replace("</thin", "[/THIN").replace("<thin", "[THIN").replace("k>", "K]")

    expected = other(reasoning), other(content)
    for pieces in ([other(text)], list(other(text))):
        assert split(pieces, begun, tags=("[THINK]", "[/THINK]")) == expected


def test_content_is_not_held_back():
    splitter = ReasoningSplitter(begun=False)
    assert splitter.feed("abc") == [("content", "abc")]
    assert splitter.feed(" ") == [("content", " ")]


def test_thinking_that_is_cut_makes_no_call():
    splitter = ReasoningSplitter(begun=True, calls=ONE)
    assert splitter.feed("one <call>{two") == [("reasoning", "one")]
    assert splitter.close(is_cut=True) == [("reasoning", " <call>{two")]


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("tags", ALL_TAGS)
def test_an_answer_that_is_sent_back_has_lost_its_thinking(tags, is_special):
    inner = tiny_tokenizer()
    inner.add_tokens(list(tags), special_tokens=is_special)
    inner.chat_template = tags[1]
    tokenizer = Tokenizer(inner, [inner.eos_token_id])
    asked, answer = (tokenizer.encode(text) for text in ("the", f"{tags[0]}hm{tags[1]}abc"))
    assert as_sent_back(tokenizer, asked, answer) == "abc"
