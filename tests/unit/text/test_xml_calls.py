"""Calls as Qwen3-Coder writes them: found however the text is cut, typed by the schema."""

import json
import random
import time
from dataclasses import replace

import pytest

from blockdraft.text import json_types
from blockdraft.text.call_syntax import calls_grammar
from blockdraft.text.json_types import resolve, schema_types
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tools import ToolChoice, parse_tools
from blockdraft.text.xml_calls import XmlCallParser
from blockdraft.text.xml_syntax import XML
from tests.grammars import accepts
from tests.grammars import grammars as grammars
from tests.grammars import tokenizer as tokenizer
from tests.tools import (
    TYPED,
    ToolCall,
    assert_refused_where_required,
    function,
    in_pieces,
    joined,
    required_calls,
)

SCHEMA = TYPED | {"required": ["name", "age"]}
TOOLS = parse_tools([function("look", parameters=SCHEMA), function("wait-2", parameters=None)])


def written(name, *parameters, tag=True):
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    call = f"<function={name}>\n{inner}</function>"
    return f"<tool_call>\n{call}\n</tool_call>" if tag else call


LOOK = written("look", ("name", "abc"), ("age", 3))
LOOK_CALL = ToolCall("look", '{"name": "abc", "age": 3}')
WAIT, WAIT_CALL = written("wait-2"), ToolCall("wait-2", "{}")
ANSWERS = [
    ("", []),
    ("a < b <tool", ["a < b <tool"]),
    ("<tool_call>\n3\n</tool_call>", ["<tool_call>\n3\n</tool_call>"]),
    (LOOK, [LOOK_CALL]),
    (f"Well.\n{LOOK}\n{WAIT}\n", ["Well.\n", LOOK_CALL, WAIT_CALL]),
    (f"{WAIT} and \n{LOOK} Done.", [WAIT_CALL, " and \n", LOOK_CALL, " Done."]),
    (written("look", ("age", 3), tag=False), [ToolCall("look", '{"age": 3}')]),
    (written("sing"), [written("sing")]),
    ("<function=loo", ["<function=loo"]),
    (
        "<function=look><parameter=name>a</parameter></function>",
        [ToolCall("look", '{"name": "a"}')],
    ),
    (
        "<tool_call><function=look>so<b>\n<parameter=age>3</parameter></tool_call>!",
        [ToolCall("look", '{"age": 3}'), "!"],
    ),
]
VALUES = [
    ("name", "3", '"3"'),
    (
        "name",
        '\n"a"\\\n<b>\u00e9</parameter\n',
        json.dumps('\n"a"\\\n<b>\u00e9</parameter\n', ensure_ascii=False),
    ),
    ("name", "", '""'),
    ("age", " 3 ", "3"),
    ("age", "three", '"three"'),
    ("ratio", "1.50", "1.50"),
    ("ratio", "None", "null"),
    ("note", "null", "null"),
    ("note", "3", '"3"'),
    ("tags", '["a",\n "b"]', '["a",\n "b"]'),
    ("tags", '["</parameter>", "\\"</parameter>"]', '["</parameter>", "\\"</parameter>"]'),
    ("tags", '["a', '"[\\"a"'),
    ("on", "True", "true"),
    ("on", "false", "false"),
    ("kind", "red", '"red"'),
    ("place", '{"x": 1}', '{"x": 1}'),
    ("any", "[1]", "[1]"),
    ("any", "True", '"True"'),
    ("any", "so it is", '"so it is"'),
    ("any", "NaN", '"NaN"'),
    ("unknown", "[" * 9999, json.dumps("[" * 9999)),
    ("a" * 256, "3", "3"),
]
ANSWERS += [
    (written("look", (key, value)), [ToolCall("look", f'{{"{key}": {found}}}')])
    for key, value, found in VALUES
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("text", "pieces"), ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_calls_are_found_however_the_text_is_cut(text, pieces, seed):
    parser = XmlCallParser(TOOLS)
    found = [piece for part in in_pieces(text, seed) for piece in parser.push(part)]
    found += parser.close()
    assert joined(found) == pieces
    assert parser.are_whole
    for call in joined(found):
        if isinstance(call, ToolCall):
            json.loads(call.arguments)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=look>", "<function=", "look>", "</function>"),
    *("<parameter=name>", "<parameter=age>", "</parameter>", "<para", "<", ">", "</"),
    *("\n", " ", "a", '"', "3", "\\"),
]


@pytest.mark.parametrize("is_cut", [True, False])
def test_pieces_do_not_depend_on_the_cuts_of_whatever_is_written(is_cut):
    draw, num_with_calls = random.Random(0), 0
    for _ in range(2000):
        begin = draw.choice(["", "<tool_call>\n<function=look>"])
        text = begin + "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 16)))
        at_once, bit_by_bit = XmlCallParser(TOOLS), XmlCallParser(TOOLS)
        whole = joined([*at_once.push(text), *at_once.close(is_cut=is_cut)])
        bits = [piece for letter in text for piece in bit_by_bit.push(letter)]
        bits += bit_by_bit.close(is_cut=is_cut)
        assert joined(bits) == whole, text
        assert all(bits)
        assert at_once.are_whole is bit_by_bit.are_whole
        calls = [piece for piece in whole if isinstance(piece, ToolCall)]
        num_with_calls += bool(calls)
        if at_once.are_whole:
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
    assert num_with_calls > 500


@pytest.mark.parametrize(
    ("text", "kept", "are_whole"),
    [
        (f"Well.{LOOK[:25]}", ["Well."], True),
        ("a <", ["a <"], True),
        (f"{WAIT}\n<tool", [WAIT_CALL], True),
        (WAIT[:-3], [WAIT_CALL], True),
        (LOOK[:60], [ToolCall("look", '{"name": "abc')], False),
        (LOOK.split("c\n")[0], [ToolCall("look", '{"name": "ab')], False),
    ],
)
def test_an_answer_that_was_cut_holds_no_half_of_a_call_as_text(text, kept, are_whole):
    for cut in range(len(text)):
        parser = XmlCallParser(TOOLS)
        found = [*parser.push(text[:cut]), *parser.push(text[cut:]), *parser.close(is_cut=True)]
        assert joined(found) == kept
        assert parser.are_whole is are_whole


def test_a_text_is_handed_out_while_it_is_written():
    parser = XmlCallParser(TOOLS)
    assert parser.push("Hi <tool_call>\n<func") == ["Hi "]
    assert parser.push("tion=look>") == [CallStart("look"), Arguments("{")]
    assert parser.push("\n<parameter=name>\nab") == [Arguments('"name": "'), Arguments("ab")]
    assert parser.push('c"</') == [Arguments('c\\"')]
    assert parser.push("b>\n") == [Arguments("</b>")]
    assert parser.push("</parameter>") == [Arguments('"')]
    assert parser.push("</function>") == [Arguments("}")]


def test_marks_within_a_json_string_cost_as_much_as_other_letters():
    value = json.dumps(["</parameter>" * 20000])
    started = time.process_time()
    parser = XmlCallParser(TOOLS)
    found = parser.push(written("look", ("tags", value)))
    assert joined(found) == [ToolCall("look", f'{{"tags": {value}}}')]
    # A hundredth of it, unless time grows with the square of the number of marks.
    assert time.process_time() - started < 3


MORE = written("look", ("name", "a\n<b>"), ("age", 3), ("kind", "red"), ("place", '{"x": 1}'))
WRONG = [
    written("look", ("name", "abc")),
    written("look", ("name", "abc"), ("age", "three")),
    written("look", ("name", "abc"), ("age", 3), ("kind", "green")),
    written("look", ("name", "abc"), ("age", 3), ("other", 1)),
    written("sing"),
]


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {"choice": ToolChoice("required")},
            [LOOK, WAIT, MORE, f"{LOOK}\n{WAIT}"],
            [*WRONG, "Hello", LOOK[12:]],
        ),
        ({"choice": ToolChoice("required", "look")}, [LOOK], [WAIT, f"{LOOK}\n{LOOK}"]),
        (
            {"choice": ToolChoice("auto"), "parallel": False},
            ["Hello", f"Well: {LOOK}", LOOK[12:]],
            [f"{LOOK}\n{WAIT}", *WRONG],
        ),
        (
            {"choice": ToolChoice("auto"), "tools": [replace(tool, strict=True) for tool in TOOLS]},
            ["Hello <func", f"Well: {LOOK}\n{WAIT} Done."],
            WRONG,
        ),
    ],
)
def test_what_the_grammar_of_calls_accepts(grammars, tokenizer, options, good, bad):
    grammar = calls_grammar(**{"tools": TOOLS, "syntax": XML, **options})
    assert [accepts(grammars, tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammars, tokenizer, grammar, text) for text in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "'a' is a text with pattern"),
        ({"properties": {"a": {"type": ["string", "integer"]}}}, "a text or something else"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "end of a parameter"),
        ({"properties": {"a>": {"type": "string"}}}, "in a tag"),
        ({"properties": {}, "required": ["a"]}, "required names are not among"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": [3]}, "malformed"),
        ({"properties": {"a": {}}, "required": 3}, "malformed"),
        ({"properties": {"a": {}}, "required": [3]}, "required names are not among"),
        ({"properties": {"a": {"type": ["string", "null"], "enum": ["None"]}}}, "text with enum"),
        ({"properties": {"a": {"type": ["string", "integer"], "const": "3"}}}, "something else"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_where_it_must_be(schema, reason):
    assert_refused_where_required(schema, reason, XML)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_parse_drafted_and_plain(llm, temperature):
    # No free text, which a random model would hardly ever end.
    small = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"kind": {"enum": ["red", "blue"]}, "on": {"type": "boolean"}, "age": small}
    schema = {"type": "object", "properties": properties, "required": ["kind"]}
    tools = parse_tools([function("look", parameters=schema), function("wait-2", parameters=None)])
    samples = required_calls(llm, tools, XML, temperature, parallel=False)
    assert [len(calls) for _, calls in samples] == [1] * len(samples)
    assert "stop" in [reason for reason, _ in samples]


ODD = [3, "x", None, [], [3], {}, {"type": 3}, {"type": [3]}, {"enum": 3}, {"anyOf": {"a": 1}}]
ODD += [{"allOf": 3}, {"$ref": 3}, {"$ref": "#/x/y"}, {"anyOf": [3]}, {"const": []}, {"enum": []}]


@pytest.mark.parametrize("odd", ODD)
def test_a_malformed_schema_breaks_nothing(odd):
    tools = parse_tools([function("look", parameters={"properties": {"a": odd}})])
    parser = XmlCallParser(tools)
    found = joined([*parser.push(written("look", ("a", "x"))), *parser.close()])
    assert found == [ToolCall("look", '{"a": "x"}')]
    calls_grammar(tools, ToolChoice("required"), XML)  # compiling tells of what it cannot follow


def test_alternatives_that_refer_to_each_other_are_looked_at_once(monkeypatch):
    followed = []
    monkeypatch.setattr(json_types, "resolve", lambda *given: followed.append(1) or resolve(*given))
    names = ["a0", "a1", "a2"]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names]}
    in_circles = {"$defs": dict.fromkeys(names, every)}
    assert schema_types(every, in_circles) == set()
    assert len(followed) == len(names)
    ends = {"$defs": {**{key: {"type": "string"} for key in names[1:]}, "a0": {"type": "null"}}}
    assert schema_types({"anyOf": [every, every]}, ends) == {"string", "null"}


def test_the_types_of_a_schema():
    assert schema_types({"$ref": "#/$defs/a"}, {"$defs": {"a": {"$ref": "#/$defs/a"}}}) == set()
    assert schema_types({"allOf": [{"type": "string"}]}, {}) == {"string"}
    assert schema_types({"anyOf": [{"type": "string"}, {}]}, {}) == set()
    assert schema_types({"enum": ["a", 1, None]}, {}) == {"string", "integer", "number", "null"}
    assert schema_types({"$ref": "#/$defs/b~1c"}, {"$defs": {"b/c": {"const": True}}}) == {
        "boolean"
    }
    assert schema_types(True, {}) == set()
