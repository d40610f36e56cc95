"""Calls in the text of an answer: found however it is cut, handed out while they are written."""

import json
import random

import pytest

from blockdraft.text import tool_calls
from blockdraft.text.call_syntax import BARE, TAGGED
from blockdraft.text.tool_calls import Arguments, CallStart, ToolCallParser
from tests.tools import (
    LOOK_CALL,
    NAMES,
    TWO_CALLS,
    WAIT_CALL,
    WRONG_NAME,
    ToolCall,
    in_pieces,
    joined,
    written,
)

EMPTY = ToolCall("look", "{}")
TRICKY = ToolCall("look", '{"name": "</tool_call>\\n<tool_call>", "age": 1e400, "age": 1.50}')
IN_QUOTES = json.dumps(f" {LOOK_CALL.arguments}\n")
ANSWERS = [
    (TAGGED, "", []),
    (TAGGED, "Hello < there", ["Hello < there"]),
    (TAGGED, written(LOOK_CALL), [LOOK_CALL]),
    (TAGGED, f"Well.\n{TWO_CALLS}\n", ["Well.\n", LOOK_CALL, WAIT_CALL]),
    (TAGGED, f"{written(WAIT_CALL)} and \n{written(LOOK_CALL)}", [WAIT_CALL, " and \n", LOOK_CALL]),
    (TAGGED, written(TRICKY), [TRICKY]),
    (TAGGED, '<tool_call>{"arguments" : {} ,"name":"look"}</tool_call>', [EMPTY]),
    (TAGGED, f"a{WRONG_NAME}b", [f"a{WRONG_NAME}b"]),
    (TAGGED, '<tool_call>\n{"name": "look", "argu', ['<tool_call>\n{"name": "look", "argu']),
    (TAGGED, "<tool_call>\n3\n</tool_call>", ["<tool_call>\n3\n</tool_call>"]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": {}, "id": 3}</tool_call>!', [EMPTY, "!"]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": {}</tool_call>', [EMPTY]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": {}} so', [EMPTY, "so"]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": {}}</tool_', [EMPTY]),
    (TAGGED, written(ToolCall("look", "[1]")), [written(ToolCall("look", "[1]"))]),
    (TAGGED, f'<tool_call>{{"name": "look", "arguments": {IN_QUOTES}}}</tool_call>', [LOOK_CALL]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": null}</tool_call>', [EMPTY]),
    (TAGGED, '<tool_call>{"name": "look"}</tool_call>', [EMPTY]),
    (TAGGED, '<tool_call>{"name": "look", "arguments": "abc"}</tool_call>', None),
    (TAGGED, '<tool_call>{"name": "look", "arguments": "[1]"}</tool_call>', None),
    (TAGGED, '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>', None),
    (TAGGED, f"{WRONG_NAME} so\n{written(LOOK_CALL)}", [f"{WRONG_NAME} so\n", LOOK_CALL]),
    (TAGGED, f"I use <tool_call>, so {written(LOOK_CALL)}", ["I use <tool_call>, so ", LOOK_CALL]),
    (TAGGED, f"<tool_call>{written(LOOK_CALL)}", ["<tool_call>", LOOK_CALL]),
    (TAGGED, f"{written(LOOK_CALL)}\n<tool_call> is", [LOOK_CALL, "\n<tool_call> is"]),
    (TAGGED, f'<tool_call>{{"a": [}}{written(LOOK_CALL)}', ['<tool_call>{"a": [}', LOOK_CALL]),
    (TAGGED, f'<tool_call>{{"a": 1</{written(LOOK_CALL)}', ['<tool_call>{"a": 1</', LOOK_CALL]),
    (TAGGED, f'<tool_call>{{"a\n {written(LOOK_CALL)}', ['<tool_call>{"a\n ', LOOK_CALL]),
    (TAGGED, '<tool_call>{"arguments": {}, "name": "look"} so', None),
    (TAGGED, "<tool_call>" + "[" * 9999 + "</tool_call>", None),
    (BARE, "", []),
    (BARE, "Hello {", ["Hello {"]),
    (BARE, written(LOOK_CALL, BARE), [LOOK_CALL]),
    (BARE, f"\n {written(LOOK_CALL, BARE)}\n", [LOOK_CALL]),
    (BARE, '{"parameters": {}, "name": "look"}', [EMPTY]),
    (BARE, '{"name": "look", "parameters": {}} so', [EMPTY, "so"]),
    (BARE, '{"name": "sing", "parameters": {}}', ['{"name": "sing", "parameters": {}}']),
    (BARE, f'{{"name": "look", "parameters": {IN_QUOTES}}}', [LOOK_CALL]),
    (BARE, '{"name": "look"}', None),
    (BARE, '{"name": "look", "parameters": null}', None),
    (BARE, '{"a": 1} is JSON', ['{"a": 1} is JSON']),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("syntax", "text", "pieces"), ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_calls_are_found_however_the_text_is_cut(syntax, text, pieces, seed):
    parser = ToolCallParser(syntax, NAMES)
    found = [piece for part in in_pieces(text, seed) for piece in parser.push(part)]
    found += parser.close()
    assert all(found)
    assert joined(found) == ([text] if pieces is None else pieces)
    assert parser.are_whole


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool",
        '{"name": "look", "arguments": ',
        '{"name": "sing", ',
    ),
    *('{"name": "look", "parameters": ', "{", "}", "}}", '"', "\\", ",", "a", "\n", " ", "{}"),
]


@pytest.mark.parametrize("syntax", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize("is_cut", [True, False])
def test_pieces_do_not_depend_on_the_cuts_of_whatever_is_written(syntax, is_cut):
    draw, num_with_calls = random.Random(0), 0
    for _ in range(3000):
        begin = draw.choice(["", f"{syntax.begin}{syntax.before}look{syntax.behind}{{"])
        text = begin + "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14)))
        at_once, bit_by_bit = ToolCallParser(syntax, NAMES), ToolCallParser(syntax, NAMES)
        whole = joined([*at_once.push(text), *at_once.close(is_cut=is_cut)])
        bits = [piece for letter in text for piece in bit_by_bit.push(letter)]
        assert joined([*bits, *bit_by_bit.close(is_cut=is_cut)]) == whole, text
        assert at_once.are_whole is bit_by_bit.are_whole
        num_with_calls += any(isinstance(piece, ToolCall) for piece in whole)
    assert 1000 < num_with_calls < 2000


def test_members_behind_the_arguments_are_read_once(monkeypatch):
    num_read, take = 0, tool_calls._JsonObject.take

    def counted(self, text):
        nonlocal num_read
        num_read += len(text)
        return take(self, text)

    monkeypatch.setattr(tool_calls._JsonObject, "take", counted)
    parser = ToolCallParser(TAGGED, NAMES)
    text = f'<tool_call>{{"name": "look", "arguments": {{}}, "id": "{"a" * 2000}"}}</tool_call>!'
    found = [piece for letter in text for piece in parser.push(letter)]
    assert joined([*found, *parser.close()]) == [EMPTY, "!"]
    assert num_read < 2 * len(text)


BROKEN = [
    (written(ToolCall("look", '{"a": NaN}')), '{"a": NaN}'),
    (written(ToolCall("look", "{three}")), "{three}"),
    ('<tool_call>{"name": "look", "arguments": {"a": "}', '{"a": "}'),
    (written(LOOK_CALL)[:-20], LOOK_CALL.arguments[:-6]),
]


@pytest.mark.parametrize(("text", "arguments"), BROKEN)
@pytest.mark.parametrize("is_cut", [True, False])
def test_arguments_that_are_no_json_are_told(text, arguments, is_cut):
    for cut in range(len(text)):
        parser = ToolCallParser(TAGGED, NAMES)
        found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.close(is_cut=is_cut)]
        assert joined(found) == [ToolCall("look", arguments)]
        assert not parser.are_whole


@pytest.mark.parametrize(
    ("syntax", "text", "kept"),
    [
        (TAGGED, written(LOOK_CALL)[:-1], [LOOK_CALL]),
        (TAGGED, f"Well.{written(LOOK_CALL)[:20]}", ["Well."]),
        (TAGGED, f"{written(WAIT_CALL)}\n<tool_call>", [WAIT_CALL]),
        (TAGGED, written(WAIT_CALL), [WAIT_CALL]),
        (TAGGED, f"{WRONG_NAME} and so", [f"{WRONG_NAME} and so"]),
        (TAGGED, "Calls are in <tool_call> tags", ["Calls are in <tool_call> tags"]),
        (TAGGED, '<tool_call>{"arguments": {"a": "</tool_call>', []),
        (TAGGED, "a <", ["a <"]),
        (TAGGED, "a <tool_ca", ["a "]),
        (TAGGED, f"{written(WAIT_CALL)}\n<to", [WAIT_CALL]),
        (BARE, written(LOOK_CALL, BARE)[:-1], [LOOK_CALL]),
        (BARE, written(LOOK_CALL, BARE)[:20], []),
        (BARE, "{", []),
        (BARE, '{"a": 1', ['{"a": 1']),
        (BARE, "Well. {", ["Well. {"]),
    ],
)
def test_half_a_call_is_no_text_of_an_answer_that_was_cut(syntax, text, kept):
    for cut in range(len(text)):
        parser = ToolCallParser(syntax, NAMES)
        found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.close(is_cut=True)]
        assert joined(found) == kept


def test_text_is_handed_out_as_soon_as_it_is_certain():
    parser = ToolCallParser(TAGGED, NAMES)
    assert parser.push("Hi <tool") == ["Hi "]
    assert parser.push("box> <") == ["<toolbox> "]
    assert parser.push('tool_call>\n{"name": "look", "argum') == []
    assert parser.push('ents": {"a') == [CallStart("look"), Arguments('{"a')]
    assert parser.push('": "}"') == [Arguments('": "}"')]
    assert parser.push("}}\n</tool_") == [Arguments("}")]
    assert parser.push("call>\n") == []
    assert parser.push("Done") == ["\nDone"]
    assert parser.push(" <tool_call>") == [" "]
    assert parser.push(" is") == ["<tool_call>", " is"]
    assert parser.push(WRONG_NAME[:-1]) == []
    assert parser.push(">") == [WRONG_NAME]
