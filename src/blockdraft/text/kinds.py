"""What kind of text a token sequence is, as a whole and token by token."""

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

NGRAM = 8
LOOP_SHARE = 0.7


def distinct_ngram_share(token_ids: Sequence[int]) -> float:
    """Distinct 8-grams over all 8-grams; 1.0 for a sequence too short to hold two."""
    total = len(token_ids) - NGRAM + 1
    if total < 2:
        return 1.0
    return len({tuple(token_ids[i : i + NGRAM]) for i in range(total)}) / total


def loops(token_ids: Sequence[int]) -> bool:
    """True if the text repeats itself: under 70 % of its 8-grams are distinct.

    Repetition is easy to draft, so figures are reported with and without such outputs.
    """
    return distinct_ngram_share(token_ids) < LOOP_SHARE


Kind = Literal["code", "json", "digits", "language", "names", "punctuation", "prose"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of a token; `token_kinds` tells them apart.

code: in a fenced block, in `backticks`, or on a line that looks like code.
json: in a fenced block named json, or in an object or list that is JSON, complete or cut off.
digits: holds a digit and no letter. language: holds a letter of another script than Latin.
names: part of a word with a capital that begins no sentence. punctuation: neither letter nor digit,
and tokens without a text. prose: the rest.
"""

# Where something is matched possessively (*+, ?+), giving it back would only take time, which could
# grow with the square or the cube of a line's length.
_FENCE = re.compile(
    r"^ {0,3}```[ \t]*+(\w*+)[^\n]*+\n.*?(?:^ {0,3}```[ \t]*(?:\n|\Z)|\Z)", re.M | re.S
)
_INLINE_CODE = re.compile(r"`[^`\n]+`")
_CODE_LINE = re.compile(
    r"""^[ \t]*+(?:
        (?:def|class|async\ def|fn|func|function)\ \w.*[:({]      # a definition
        |(?:if|for|while|elif|else|try|except|with)\b.*:[ \t]*$   # a Python statement
        |(?:import\ [\w.]+|from\ [\w.]+\ import\ .+)$
        |(?:return|raise|yield)\b.*[()\[\]+*/=].*$
        |[\w.\[\]]+(?:,\ ?[\w.]+)*\ ?(?:[-+*/|&]?=|:=)\ ?\S.*$    # an assignment
        |[\w.]+\(.*\)[;:]?$                                       # a call
        |(?:\#include|\#!|//|@\w).*$
        |(?:[^\n=()]*+[=()].*;|.*[{}])[ \t]*$                     # the end of a C statement
    )\n?""",
    re.M | re.X,
)
_JSON_START = re.compile(r'\{\s*"(?:[^"\\\n]|\\.)*"\s*:|\[\s*(?:\{\s*"|"(?:[^"\\\n]|\\.)*"\s*,)')
_WORD = re.compile(r"[^\W\d_][\w'’-]*")
_SENTENCE_START = re.compile(r"(?:^|[.!?:…]['\"”’)]*\s|\n)[\s\"'“‘(*#>•-]*+(?:\d+[.)]\s+)?+\W*$")
_FIRST_PERSON = re.compile(r"I(?:['’]\w+)?$")
_LOOK_BACK = 40
"""Characters before a word that tell whether it begins a sentence."""

_Span = tuple[int, int]


def token_kinds(pieces: Sequence[str], before: str = "") -> list[Kind]:
    """The kind of each token, given the text that each of them adds.

    `before` is text in front of the first, such as the code that a raw prompt begins. The token's
    first visible character decides. Where several kinds claim it, a fence comes first, then JSON,
    other code, names. A token without a text of its own, such as half a character, is of the kind
    of the next that has some; behind the last one it is punctuation.
    """
    text = before + "".join(pieces)
    marks: list[Kind | None] = [None] * len(text)
    for kind, (start, end) in _spans(text):
        marks[start:end] = [mark or kind for mark in marks[start:end]]
    kinds: list[Kind] = []
    start, num_empty = len(before), 0
    for piece in pieces:
        if not piece:
            num_empty += 1
            continue
        first = start + len(piece) - len(piece.lstrip())
        mark = marks[min(first, start + len(piece) - 1)]
        kinds += [mark or _kind_of(piece)] * (num_empty + 1)
        start, num_empty = start + len(piece), 0
    return kinds + ["punctuation"] * num_empty


def _kind_of(piece: str) -> Kind:
    """The kind of a token that no span of the text claims."""
    letters = [letter for letter in piece if letter.isalpha()]
    if any(not unicodedata.name(letter, "").startswith("LATIN") for letter in letters):
        return "language"
    if letters:
        return "prose"
    return "digits" if any(sign.isdigit() for sign in piece) else "punctuation"


def _spans(text: str) -> Iterator[tuple[Kind, _Span]]:
    """Stretches of one kind; where they overlap the earlier one counts."""
    fences = list(_FENCE.finditer(text))
    for fence in fences:
        yield "json" if fence[1].lower() == "json" else "code", fence.span()
    starts = [fence.start() for fence in fences]
    for start, end in _json_spans(text):
        before = bisect_left(starts, end)  # fences that begin before it ends; the last reaches most
        if not before or fences[before - 1].end() <= start:
            yield "json", (start, end)
    for pattern in (_INLINE_CODE, _CODE_LINE):
        for match in pattern.finditer(text):
            yield "code", match.span()
    for word in _WORD.finditer(text):
        if _is_name(text, word):
            yield "names", word.span()


def _json_spans(text: str) -> Iterator[_Span]:
    # Python makes no number of thousands of digits, and none is needed.
    decoder, end = json.JSONDecoder(parse_int=str), 0
    for match in _JSON_START.finditer(text):
        if match.start() < end:
            continue
        try:
            _, end = decoder.raw_decode(text, match.start())
        except json.JSONDecodeError as error:
            # Cut off where generation ended: JSON as far as it goes. Otherwise up to the fault.
            end = error.pos
        except RecursionError:
            end = len(text)
        yield match.start(), max(end, match.end())


def _is_name(text: str, word: re.Match[str]) -> bool:
    if not word[0][0].isupper() or _FIRST_PERSON.match(word[0]):
        return False
    if not unicodedata.name(word[0][0], "").startswith("LATIN"):
        return False
    front = text[max(0, word.start() - _LOOK_BACK) : word.start()]
    return _SENTENCE_START.search(front) is None
