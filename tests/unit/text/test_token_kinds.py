"""The kind of each token, from its text and what stands around it."""

import re
import time

import pytest

from blockdraft.text.kinds import KINDS, token_kinds
from blockdraft.text.pieces import printable, text_pieces, token_label, visible
from blockdraft.text.tokenizer import Tokenizer
from tests.tiny import tiny_tokenizer

TOKENS = re.compile(r" ?\w+|\n+| ?[^\w\s]+|\s+")


def kinds_of(text, before=""):
    """Token texts with their kinds; words and runs of signs are tokens."""
    pieces = TOKENS.findall(text)
    assert "".join(pieces) == text
    return list(zip(pieces, token_kinds(pieces, before), strict=True))


def words_of(kind, text, before=""):
    return [piece.strip() for piece, own in kinds_of(text, before) if own == kind]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("prose", "It is a nice day", ["It", "is", "a", "nice", "day"]),
        ("digits", "It is 1,234 m or 5", ["1", "234", "5"]),
        ("punctuation", "Yes, it is.\n", [",", ".", ""]),
        ("punctuation", "Fine 🙂 so", ["🙂"]),
        ("names", "The sea near Old Lisbon is cold. The end.", ["Old", "Lisbon"]),
        ("names", "I met Ann. She said that I'm late", ["Ann"]),
        ("names", 'He said: "The dog" ate.\n- Then\n1. First', []),
        ("names", "Hello there", []),
        ("names", "Ask O'Neil", ["O", "'", "Neil"]),
        ("language", "Say привет or 你好 or hello", ["привет", "你好"]),
        ("language", "Ärger über Äpfel", []),
        ("code", "Use `f(x)` now", ["`", "f", "(", "x", ")`"]),
        ("code", "see:\n    return x + 1\nand go", ["return", "x", "+", "1", ""]),
        ("code", "x = 3\nfine", ["x", "=", "3", ""]),
        ("code", "int f() {\nso", ["int", "f", "()", "{", ""]),
        ("code", "It is so; and thus:\nno code", []),
        ("code", "With love:\nfrom me to you", []),
        ("json", 'It is {"a": [1, true]} here', ["{", '"', "a", '":', "[", "1", ",", "true", "]}"]),
        ("json", '{"a": 1, "b": [1', ["{", '"', "a", '":', "1", ",", '"', "b", '":', "[", "1"]),
        ("json", "a set {x} or [see] here", []),
    ],
)
def test_tokens_are_told_apart(kind, text, words):
    found = words_of(kind, text)
    # Signs may be cut differently; what counts is which stretch is of the kind.
    assert "".join(found) == "".join(words)


def test_a_fence_holds_code_with_all_that_is_in_it():
    text = "Here:\n```python\nx = 12  # Ann\n```\nDone in Rome.\n"
    kinds = dict(kinds_of(text))
    assert {kinds[piece] for piece in ("python", "x", " 12", " Ann")} == {"code"}
    assert (kinds["Here"], kinds["Done"], kinds[" Rome"]) == ("prose", "prose", "names")


def test_a_fence_that_was_cut_off_holds_the_rest():
    assert words_of("prose", "Go:\n```\nif this then") == ["Go"]


def test_a_fence_named_json_is_json():
    kinds = {kind for _, kind in kinds_of('```json\n{"a": "b"}\n```')}
    assert kinds == {"json"}


def test_json_ends_where_it_is_none_any_more():
    assert words_of("prose", 'x {"a": 1} and more') == ["x", "and", "more"]
    assert "prose" in words_of("prose", '{"a": oh} then prose follows')


def test_the_text_before_counts():
    text = "    pass more\n"
    assert {kind for _, kind in kinds_of(text, "```python\ndef f():\n")} == {"code"}
    assert {kind for _, kind in kinds_of(text)} == {"prose", "punctuation"}
    assert words_of("names", "Paris", before="I live in ") == ["Paris"]


def test_parts_of_a_word_share_its_kind():
    assert token_kinds(["I like ", "Mo", "nac", "o", "."]) == ["prose"] + ["names"] * 3 + [
        "punctuation"
    ]


def test_tokens_without_a_text_go_with_the_next():
    assert token_kinds(["", "", "你", "", ""]) == ["language"] * 3 + ["punctuation"] * 2
    assert token_kinds([]) == []
    assert token_kinds(["", ""]) == ["punctuation"] * 2


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" " * 3000 + "(" * 3000 + "x", id="spaces"),
        pytest.param("(;" * 12_000 + "x", id="statement"),
        pytest.param("def " + "a" * 20_000, id="definition"),
        pytest.param("```" + " " * 30_000, id="fence"),
    ],
)
def test_odd_texts_take_no_more_time_than_others(text):
    started = time.process_time()
    token_kinds([text])
    # A hundredth of it, unless time grows with the square of a line's length.
    assert time.process_time() - started < 1.0


def test_a_number_of_any_length_is_json():
    assert token_kinds(['{"a": ', "1" * 5000, "}"]) == ["json"] * 3


def test_every_kind_is_listed_and_nested_json_does_no_harm():
    kinds = token_kinds(['{"a":' * 3000, "[" * 3000])
    assert kinds == ["json", "json"]
    assert set(kinds) <= set(KINDS)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer(), ())


def test_pieces_join_to_the_text(tokenizer):
    text = "the abc, é 你好 🙂!"
    ids = tokenizer.encode(text)
    pieces = text_pieces(tokenizer, tokenizer.encode("so "), ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert "" in pieces  # the first bytes of a character
    half = text_pieces(tokenizer, [], tokenizer.encode("你")[:-1])
    assert "".join(half).strip("\N{REPLACEMENT CHARACTER}") == ""
    assert text_pieces(tokenizer, [], []) == []


def test_tokens_have_labels(tokenizer):
    (end,) = tokenizer.encode("<|end|>")
    assert token_label(tokenizer, end) == "<|end|>"
    assert token_label(tokenizer, tokenizer.encode(" the")[0]) == " the"
    assert token_label(tokenizer, 99999) == "<99999>"


def test_parts_of_characters_are_told_apart(tokenizer):
    labels = [token_label(tokenizer, token_id) for token_id in tokenizer.encode("é🙂")]
    assert "".join(labels) == r"\xc3\xa9\xf0\x9f\x99\x82"


def test_what_cannot_be_seen_is_shown():
    assert visible(" a b\n") == "␣a b⏎"
    assert visible("\t") == "⇥"
    assert visible("") == ""
    assert printable("a\x1b[31m\nb\x9b") == "a\\x1b[31m\nb\\x9b"
    assert printable("a\u202eb \u2068\u05d0\u200f") == "a\\u202eb \\u2068\u05d0\u200f"
