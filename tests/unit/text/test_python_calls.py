"""Calls as Python has them: found however the text is cut, their literals read as JSON."""

import json
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from blockdraft import RequestError
from blockdraft.text.argument_values import from_python
from blockdraft.text.call_syntax import calls_grammar
from blockdraft.text.python_calls import PythonCallParser
from blockdraft.text.python_syntax import LFM2, OLMO, PYTHON
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tool_prompt import encode_tool_chat, native_syntax
from blockdraft.text.tools import ToolChoice, parse_tools
from tests.call_formats import BARE_PYTHON, TEMPLATES, TOOLS_SHOWN, TURNS
from tests.grammars import accepts
from tests.grammars import grammars as grammars
from tests.grammars import tokenizer as tokenizer
from tests.tiny import tiny_tokenizer
from tests.tools import (
    TYPED,
    ToolCall,
    assert_refused_where_required,
    function,
    joined,
    required_calls,
)

SCHEMA = TYPED | {"required": ["age"]}
TOOLS = parse_tools([function("look", parameters=SCHEMA), function("wait-2", parameters=None)])
OLD, WAITING = ToolCall("look", '{"age": 90}'), ToolCall("wait-2", "{}")
SYNTAXES = pytest.mark.parametrize("syntax", [PYTHON, LFM2, OLMO], ids=["bare", "lfm2", "olmo"])


def parsed(syntax, *texts, is_cut=False):
    parser = PythonCallParser(TOOLS, syntax)
    found = [piece for text in texts for piece in parser.push(text)]
    found += parser.close(is_cut=is_cut)
    assert all(found)
    return joined(found), parser.are_whole


def around(syntax, *calls):
    return f"{syntax.section}{syntax.between.join(calls)}{syntax.section_end}"


VALUES = [
    ("name='abc'", "abc"),
    ('name="abc"', "abc"),
    ("name='it\\'s \"so\"'", 'it\'s "so"'),
    ("name='it's so'", "it's so"),
    ("name='a, (b)] = {'", "a, (b)] = {"),
    ("name='</function_calls>]<|tool_call_end|>'", "</function_calls>]<|tool_call_end|>"),
    ("name='a\nb\\n\\\nc\\t\\\\n\\d\\/'", "a\nb\nc\t\\n\\d/"),
    ("name='\\x41\\u00e9\\U0001F600\\ud83d\\ude00'", "A\u00e9\U0001f600\U0001f600"),
    ("name='\\ud83d'", "\N{REPLACEMENT CHARACTER}"),
    ("name='\\U00110000\\u12'", "\\U00110000\\u12"),
    ("name=''", ""),
    ("name=''so''", "'so'"),
    ('name="""\nprint("a")\n"b", \\""" c"""', '\nprint("a")\n"b", """ c'),
    ("name='''it's 'a', ''b''), c'''", "it's 'a', ''b''), c"),
    ("name=''''''", ""),
    ("age=1_000", 1000),
    ("name='1_000'", "1_000"),
    ("name=a_1", "a_1"),
    ("name=abc", "abc"),
    ("name=3", "3"),
    ("name=True", "True"),
    ("name=f'{a}'", "f'{a}'"),
    ("age=-3", -3),
    ("age='3'", 3),
    ("age=three", "three"),
    ("age=2 * (3 + 4)", "2 * (3 + 4)"),
    ("note=None", None),
    ("note='None'", "None"),
    ("on=True", True),
    ("on=false", False),
    ("on='True'", True),
    ("kind='red'", "red"),
    ("tags=['a', 'it's', \"b\",]", ["a", "it's", "b"]),
    ("tags=('a', 'b')", ["a", "b"]),
    ("tags=[]", []),
    ("place={'x': 1.5}", {"x": 1.5}),
    (
        "any={'a': [True, None, {'b': (1, 2)}], 'True': 'None'}",
        {"a": [True, None, {"b": [1, 2]}], "True": "None"},
    ),
    ('any={"a": [true, null]}', {"a": [True, None]}),
    ("any=['a', '''b', ''', '']", ["a", "b', ", ""]),
    ("any={1: 2}", "{1: 2}"),
    ("any=NaN", "NaN"),
    ("unknown = 1e3 ", 1000.0),
    ("any=" + "[" * 9999 + "]" * 9999, "[" * 9999 + "]" * 9999),
    ("any=" + "1" * 9999, "1" * 9999),
]


@pytest.mark.parametrize(("written", "value"), VALUES, ids=[one[:30] for one, _ in VALUES])
@SYNTAXES
def test_a_value_is_read_as_python_has_it(syntax, written, value):
    text = around(syntax, f"look({written}, last=90)", "wait-2()")
    found, are_whole = parsed(syntax, text)
    assert [type(one) for one in found] == [ToolCall, ToolCall]
    name = written.partition("=")[0].strip()
    assert json.loads(found[0].arguments) == {name: value, "last": 90}
    assert (found[1], are_whole) == (WAITING, True)
    if len(text) < 1000:
        for cut in range(len(text)):
            assert parsed(syntax, text[:cut], text[cut:]) == (found, True)


def some_value(draw, depth=0):
    kind = draw.randint(0, 7 if depth < 3 else 5)
    if kind > 5:
        values = [some_value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        return values if kind == 6 else {some_text(draw): value for value in values}
    return [True, None, draw.randint(-99, 99), draw.random(), some_text(draw), ""][kind]


def some_text(draw):
    return "".join(
        draw.choices(" ,)(]}{:=\"'\\\nan0\t/\x00\xe9\u2028\U0001f600", k=draw.randint(0, 6))
    )


@pytest.mark.parametrize("write", [repr, json.dumps], ids=["Python", "JSON"])
def test_literals_of_every_kind_are_read(write):
    draw = random.Random(0)
    for _ in range(1000):
        first, second = some_value(draw), some_value(draw)
        text = around(LFM2, f"look(any={write(first)} , more={write(second)})", "wait-2()")
        cut = draw.randint(0, len(text))
        found, are_whole = parsed(LFM2, text[:cut], text[cut:])
        assert are_whole, text
        assert [json.loads(call.arguments) for call in found] == [
            {"any": first, "more": second},
            {},
        ], text


def test_a_value_is_typed_by_the_schema():
    for text, types, value in (
        ('"3"', {"integer"}, "3"),
        ("'[1]'", {"array"}, "[1]"),
        ("'3'", {"string", "integer"}, '"3"'),
        ("3", {"string"}, '"3"'),
        ("{'x': 3}", {"string"}, "\"{'x': 3}\""),
        ("{'x': 3}", {"array"}, '{"x": 3}'),
        ("'x'", set(), '"x"'),
        ("'x'", {"integer"}, '"x"'),
    ):
        assert from_python(text, frozenset(types)) == value


ANSWERS = [
    ("", []),
    ("Hello [", ["Hello ["]),
    (" \n[look(age=90)]\n", [OLD]),
    ("[look(age=90), wait-2()] So.", [OLD, WAITING, " So."]),
    ("[look(age=90) so", [OLD, " so"]),
    ("[look(age=90), lookout, wait-2()]", [OLD, ", lookout, wait-2()]"]),
    ("[look(age=90), lo", [OLD, ", lo"]),
    ("[sing(a=1, b=(2)), look(age=90)]", ["[sing(a=1, b=(2))", OLD]),
    ("[look(90), look(age=90)]", ["[look(90)", OLD]),
    ("[f(x), g(y)] are functions", None),
    ("[1, 2]", None),
    ("[look](a link)", None),
    ("[look(age", None),
    ("look(age=90)", None),
    ("So: [look(age=90)]", None),
]


@pytest.mark.parametrize(("text", "pieces"), ANSWERS)
def test_calls_without_marks_are_at_the_start_of_the_answer(text, pieces):
    wanted = [text] if pieces is None else pieces
    assert parsed(PYTHON, text) == (wanted, True)
    assert parsed(PYTHON, *text) == (wanted, True)


@SYNTAXES
def test_what_is_no_argument_by_name_is_told(syntax):
    text = around(syntax, "look(age=90, 3, **more)")
    wanted = [ToolCall("look", '{"age": 90, 3, **more}')]
    assert parsed(syntax, text) == parsed(syntax, *text) == (wanted, False)


CALL = "look(name='a', age=[3])"
FRAGMENTS = [
    *("look(", "wait-2(", "sing(", "age=", "name=", "=", ")", "(", "[", "]", ",", " ", "\n"),
    *("'", '"', "\\", "3", "True", "a", "<", "look", "wait-2()", "look(age=3)", "sing('a')"),
]


@SYNTAXES
@pytest.mark.parametrize("is_cut", [True, False])
def test_pieces_do_not_depend_on_the_cuts_of_whatever_is_written(syntax, is_cut):
    draw, num_with_calls, num_whole = random.Random(0), 0, 0
    marks = [syntax.section, syntax.section_end, *syntax.marks]
    for _ in range(1500):
        begin = draw.choice(
            ["", *(syntax.section + one for one in ("", "look(age=", "sing(", CALL))]
        )
        text = begin + "".join(draw.choices([*FRAGMENTS, *marks], k=draw.randint(1, 14)))
        whole, are_whole = parsed(syntax, text, is_cut=is_cut)
        assert parsed(syntax, *text, is_cut=is_cut) == (whole, are_whole), text
        cut = draw.randint(0, len(text))
        assert parsed(syntax, text[:cut], text[cut:], is_cut=is_cut) == (whole, are_whole), text
        calls = [piece for piece in whole if isinstance(piece, ToolCall)]
        num_with_calls += bool(calls)
        num_whole += bool(calls) and are_whole
        if are_whole:
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
        if not calls and not is_cut:
            assert "".join(whole) == text
    assert num_with_calls > 600
    assert num_whole > 100


@SYNTAXES
def test_an_answer_that_was_cut_leaves_its_arguments_and_no_half_of_a_call(syntax):
    text = around(syntax, "look(name='a', age=90)", "wait-2()")
    for length in range(2, len(text)):
        found, _ = parsed(syntax, text[:length], is_cut=True)
        assert all(isinstance(piece, ToolCall) for piece in found)
        assert all('{"name": "a", "age": 90}'.startswith(call.arguments) for call in found[:1])
    assert parsed(syntax, text[: text.index("90")], is_cut=True) == (
        [ToolCall("look", '{"name": "a"')],
        False,
    )


def test_an_argument_is_handed_out_when_it_is_complete():
    parser = PythonCallParser(TOOLS, LFM2)
    assert parser.push("Hi <|tool_call") == ["Hi "]
    assert parser.push("_start|>[look(na") == []
    assert parser.push("me='a'") == [CallStart("look"), Arguments("{")]
    assert parser.push(", ") == [Arguments('"name": "a"')]
    assert parser.push("age=3") == []
    assert parser.push(")") == [Arguments(', "age": 3'), Arguments("}")]
    assert parser.push("]<|tool_call_end|>!") == ["!"]


def test_the_name_of_an_unknown_function_is_handed_out_at_once():
    parser = PythonCallParser(TOOLS, PYTHON)
    assert parser.push("[sing(") == ["[sing("]
    assert parser.push("a=[1, ") == ["a=[1, "]


GOOD = [
    ("look(age=3)",),
    ('look(name="a\\n", age=-3)', "wait-2()"),
    ('look(age=3, note=None, tags=["a"], on=True, kind="red", place={"x": 1})',),
    ("look(age=3, note=null, on=false, any=[{}])",),
]
BAD = [
    (),
    ("look()",),
    ('look(name="a")',),
    ("look(age=3,)",),
    ("look(, age=3)",),
    ("look(age=3, name='a')",),
    ('look(age="3")',),
    ("look(age=None)",),
    ('look(age=3, kind="green")',),
    ("look(age=3, tags=None)",),
    ("look(age=3, other=1)",),
    ("sing()",),
]


@SYNTAXES
def test_what_the_grammar_of_calls_accepts(grammars, tokenizer, syntax):
    def fits(grammar, calls):
        return accepts(grammars, tokenizer, grammar, around(syntax, *calls))

    required = calls_grammar(TOOLS, ToolChoice("required"), syntax)
    assert [fits(required, calls) for calls in GOOD] == [True] * len(GOOD)
    assert [fits(required, calls) for calls in BAD] == [False] * len(BAD)
    for calls in GOOD:
        found, are_whole = parsed(syntax, around(syntax, *calls))
        assert are_whole
        assert len(found) == len(calls)
    once = calls_grammar(TOOLS, ToolChoice("required"), syntax, parallel=False)
    named = calls_grammar(TOOLS, ToolChoice("required", "look"), syntax)
    for grammar in (once, named):
        assert [fits(grammar, calls) for calls in GOOD] == [True, False, True, True]


def test_optional_arguments_may_be_left_out(grammars, tokenizer):
    schema = {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}}
    tools = parse_tools([function(parameters=schema)])
    grammar = calls_grammar(tools, ToolChoice("required"), PYTHON)
    texts = ["", "a=1", "b=2", "c=3", "a=1, b=2", "a=1, c=3", "b=2, c=3", "a=1, b=2, c=3"]
    assert all(accepts(grammars, tokenizer, grammar, f"[look({text})]") for text in texts)
    for text in (", a=1", "b=2, a=1", "a=1, ", "a=1,  b=2", "a=2"):
        assert not accepts(grammars, tokenizer, grammar, f"[look({text})]")


def test_a_call_without_a_mark_can_be_required_and_not_watched_for():
    strict = [replace(tool, strict=True) for tool in TOOLS]
    with pytest.raises(RequestError, match="no start mark"):
        calls_grammar(strict, ToolChoice("auto"), PYTHON)
    with pytest.raises(RequestError, match="no start mark"):
        calls_grammar(TOOLS, ToolChoice("auto"), PYTHON, parallel=False)
    assert calls_grammar(TOOLS, ToolChoice("auto"), PYTHON) is None


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"two words": {}}}, "'two words' is not a valid"),
        ({"properties": {"3": {}}}, "'3' is not a valid"),
        ({"properties": {"a" * 257: {}}}, "257 letters"),
        ({"properties": {}, "required": ["a"]}, "required names are not among"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused_where_it_must_be(schema, reason):
    assert_refused_where_required(schema, reason, OLMO)


@pytest.mark.parametrize("syntax", [PYTHON, OLMO], ids=["bare", "olmo"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_parse_drafted_and_plain(llm, temperature, syntax):
    # No free text, which a random model would hardly ever end.
    small = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"kind": {"enum": ["red", "blue"]}, "on": {"type": "boolean"}, "age": small}
    schema = {"type": "object", "properties": properties, "required": ["on"]}
    tools = parse_tools([function("look", parameters=schema), function("wait-2", parameters=None)])
    samples = required_calls(llm, tools, syntax, temperature, parallel=False)
    assert [len(calls) for _, calls in samples] == [1] * len(samples)
    assert "stop" in [reason for reason, _ in samples]


def templated(template, marks=()):
    inner = tiny_tokenizer()
    inner.add_tokens(list(marks), special_tokens=True)
    inner.chat_template = template
    return Tokenizer(inner, [inner.eos_token_id])


OLDER_LFM2 = TOOLS_SHOWN.replace("TOOLS:", "List of tools: ") + TURNS + "{% endfor %}"
CALLED = {"name": "look", "arguments": json.dumps({"name": 'it\'s "so"', "on": True})}
CONVERSATION = [
    {"role": "user", "content": "How old?"},
    {"role": "assistant", "content": "So:", "tool_calls": [{"id": "a", "function": CALLED}]},
    {"role": "tool", "tool_call_id": "a", "content": "old"},
]


def test_the_template_says_how_calls_are_written():
    for template, marks, syntax in (
        (BARE_PYTHON, (), PYTHON),
        (TEMPLATES["lfm2"], (), LFM2),
        (OLDER_LFM2, LFM2.marks, LFM2),
        (OLDER_LFM2, (), None),
        (TEMPLATES["olmo"], (), OLMO),
        (TEMPLATES["olmo"].replace(TOOLS_SHOWN, ""), (), None),
        (TEMPLATES["olmo"] + "{# <invoke name='look'> #}", (), None),
    ):
        assert native_syntax(templated(template, marks)) == syntax


def test_calls_that_are_sent_back_are_in_the_prompt_as_the_model_writes_them():
    text = LFM2.write([("look", json.loads(CALLED["arguments"]))])
    assert text == '<|tool_call_start|>[look(name="it\'s \\"so\\"", on=True)]<|tool_call_end|>'
    assert parsed(LFM2, text)[0] == [ToolCall("look", '{"name": "it\'s \\"so\\"", "on": true}')]
    older = templated(OLDER_LFM2, LFM2.marks)
    for depth in range(800, 1000):
        deep = {"name": "look", "arguments": f'{{"a": {"[" * depth}{"]" * depth}}}'}
        turn = {**CONVERSATION[1], "tool_calls": [{"function": deep}]}
        with suppress(RequestError):
            encode_tool_chat(older, [turn], TOOLS)
    prompt = older.decode_all(encode_tool_chat(older, CONVERSATION, TOOLS))
    assert prompt.startswith("List of tools: ")
    assert prompt.endswith(f"[assistant]So:{text}[tool]old")
    thought = [CONVERSATION[0], {**CONVERSATION[1], "reasoning_content": "hm"}]
    shown = templated(TEMPLATES["lfm2"].replace("]{{ m.content", "]{{ m.thinking }}|{{ m.content"))
    shown._tokenizer.chat_template += "{# message.thinking #}"
    prompt = shown.decode_all(encode_tool_chat(shown, thought, TOOLS))
    assert "[assistant]hm|So:<|tool_call_start|>[look(" in prompt
    bare = templated(BARE_PYTHON)
    prompt = bare.decode_all(encode_tool_chat(bare, CONVERSATION, TOOLS))
    assert prompt.endswith('[assistant]So:[look(name="it\'s \\"so\\"", on=true)][tool]old')
