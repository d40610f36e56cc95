"""Tools: what is refused, how a model is told of them, and that required calls always parse."""

import json

import pytest

from blockdraft import RequestError
from blockdraft.core.request import MAX_TOOLS
from blockdraft.text.call_syntax import BARE, TAGGED, calls_grammar
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_prompt import encode_tool_chat, native_syntax
from blockdraft.text.tools import ToolChoice, parse_tool_choice, parse_tools
from blockdraft.text.xml_syntax import XML
from tests.grammars import accepts
from tests.grammars import grammars as grammars
from tests.grammars import tokenizer as tokenizer
from tests.schemas import SCHEMAS
from tests.tiny import tiny_tokenizer
from tests.tools import (
    LOOK,
    LOOK_CALL,
    NAMES,
    TOOLS,
    TWO_CALLS,
    WAIT,
    WAIT_CALL,
    WRONG_NAME,
    ToolCall,
    function,
    required_calls,
    written,
)


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ([], "give a list of functions"),
        ("look", "give a list of functions"),
        ({"a": 1}, "give a list of functions"),
        ([3], "is not a function"),
        ([{"type": "web_search"}], "'function'"),
        ([{"type": "function"}], "lacks the object"),
        ([function(name="two words")], "'two words'"),
        ([function(name="a" * 65)], "64 letters"),
        ([function(name=None)], "None"),
        ([function(description=3)], "description"),
        ([function(parameters=[1])], "parameters of function 'look'"),
        ([function(parameters={"type": "array"})], "parameters of function 'look'"),
        ([function(strict="yes")], "strict of function 'look'"),
        ([LOOK, LOOK], "'look' twice"),
        ([function(f"f{index}") for index in range(MAX_TOOLS + 1)], f"at most {MAX_TOOLS}"),
    ],
)
def test_malformed_tools_are_refused(tools, reason):
    with pytest.raises(RequestError, match=reason):
        parse_tools(tools)


def test_null_is_the_same_as_nothing():
    (given,) = parse_tools([function(description=None, parameters=None, strict=None)])
    (bare,) = parse_tools([{"type": "function", "function": {"name": "look"}}])
    assert given == bare


def test_a_choice_is_a_mode_or_a_function():
    assert parse_tool_choice(None, TOOLS) == ToolChoice("auto")
    assert parse_tool_choice("none", TOOLS) == ToolChoice("none")
    named = {"type": "function", "function": {"name": "look"}}
    assert parse_tool_choice(named, TOOLS) == ToolChoice("required", "look")
    for choice in ("any", 3, {}, ["auto"], {"type": "function"}, {"function": {"name": "look"}}):
        with pytest.raises(RequestError, match="tool_choice is"):
            parse_tool_choice(choice, TOOLS)
    sung = {"type": "function", "function": {"name": "sing"}}
    with pytest.raises(RequestError, match="'sing', which is not among the tools; name one"):
        parse_tool_choice(sung, TOOLS)
    for mode in ("auto", "required"):
        choice = parse_tool_choice(allowed(mode, named), TOOLS)
        assert choice == ToolChoice(mode, allowed=frozenset({"look"}))
        assert [tool.name for tool in choice.among(TOOLS)] == ["look"]
        with pytest.raises(RequestError, match="'sing', which is not among"):
            parse_tool_choice(allowed(mode, named, sung), TOOLS)
    odd = (allowed("none", named), allowed("auto"), {"type": "allowed_tools"})
    for choice in (*odd, {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}):
        with pytest.raises(RequestError, match="mode auto or required, and at least one"):
            parse_tool_choice(choice, TOOLS)
    with pytest.raises(RequestError, match=r"'web_search'.*give auto, none"):
        parse_tool_choice(allowed("auto", {"type": "web_search"}), TOOLS)


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_only_an_obligation_strictness_or_a_single_call_needs_a_grammar():
    strict = parse_tools([function(strict=True), WAIT])
    for tools, mode, parallel, needed in [
        (TOOLS, "auto", True, False),
        (TOOLS, "none", False, False),
        (TOOLS, "auto", False, True),
        (strict, "auto", True, True),
        (TOOLS, "required", True, True),
    ]:
        grammar = calls_grammar(tools, ToolChoice(mode), TAGGED, parallel=parallel)
        assert (grammar is not None) is needed
    with pytest.raises(RequestError, match="no start mark"):
        calls_grammar(strict, ToolChoice("auto"), BARE)
    # A call without a begin is the whole answer: there is only ever one.
    assert calls_grammar(TOOLS, ToolChoice("auto"), BARE, parallel=False) is None
    names = frozenset(NAMES)
    assert calls_grammar(TOOLS, ToolChoice("auto", allowed=names), TAGGED) is None
    with pytest.raises(RequestError, match=r"no start mark.* allowed_tools, or require a call"):
        calls_grammar(TOOLS, ToolChoice("auto", allowed=names - {"look"}), BARE)


WRONG_ARGUMENTS = written(ToolCall("look", '{"name": 3}'))


@pytest.mark.parametrize(
    ("options", "good", "bad"),
    [
        (
            {"choice": ToolChoice("required")},
            [written(LOOK_CALL), written(WAIT_CALL), TWO_CALLS],
            ["Hello", WRONG_NAME, WRONG_ARGUMENTS],
        ),
        (
            {"choice": ToolChoice("required"), "parallel": False},
            [written(LOOK_CALL)],
            [TWO_CALLS, "Hello"],
        ),
        (
            {"choice": ToolChoice("required", "look")},
            [written(LOOK_CALL)],
            [written(WAIT_CALL), TWO_CALLS],
        ),
        (
            {"choice": ToolChoice("required"), "syntax": BARE},
            [written(LOOK_CALL, BARE), written(WAIT_CALL, BARE)],
            [written(LOOK_CALL), f"{written(WAIT_CALL, BARE)}\n{written(WAIT_CALL, BARE)}"],
        ),
        (
            {"choice": ToolChoice("auto"), "tools": parse_tools([function(strict=True), WAIT])},
            ["Hello <tool", f"Well:\n{written(LOOK_CALL)}", f"{TWO_CALLS} Done."],
            [WRONG_NAME, f"a {WRONG_ARGUMENTS}", f"{written(WAIT_CALL)}{WRONG_NAME}"],
        ),
        (
            {"choice": ToolChoice("auto"), "parallel": False},
            ["Hello", f"Well: {written(LOOK_CALL)}"],
            [TWO_CALLS, WRONG_ARGUMENTS],
        ),
        (
            {"choice": ToolChoice("auto", allowed=frozenset({"look"}))},
            ["Hello", f"Well: {written(LOOK_CALL)}", f"{written(LOOK_CALL)}\n" * 2],
            [TWO_CALLS, f"Well: {written(WAIT_CALL)}", WRONG_ARGUMENTS],
        ),
        (
            {"choice": ToolChoice("required", allowed=frozenset({"look"}))},
            [written(LOOK_CALL), f"{written(LOOK_CALL)}\n{written(LOOK_CALL)}"],
            ["Hello", TWO_CALLS, written(WAIT_CALL)],
        ),
    ],
)
def test_what_the_grammar_of_calls_accepts(grammars, tokenizer, options, good, bad):
    grammar = calls_grammar(**{"tools": TOOLS, "syntax": TAGGED, **options})
    assert [accepts(grammars, tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammars, tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def test_a_schema_that_cannot_be_followed_is_refused(grammars):
    tools = parse_tools([function(parameters={"properties": {"a": {"type": "foo"}}})])
    with pytest.raises(RequestError, match="Invalid type: foo"):
        grammars.compile(calls_grammar(tools, ToolChoice("required"), TAGGED))


@pytest.mark.one_in(6)
@pytest.mark.parametrize("syntax", [TAGGED, BARE], ids=["tagged", "bare"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_required_calls_parse_drafted_and_plain(llm, syntax, temperature):
    tools = parse_tools(
        [
            function(f"f{i}", parameters=SCHEMAS[name])
            for i, name in enumerate(("object", "optional", "nested", "tree", "quotes in names"))
        ]
    )
    for reason, calls in required_calls(llm, tools, syntax, temperature):
        assert reason == "stop"
        assert calls


QWEN = (
    "{%- if tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    'Answer <tool_call>\\n{\\"name\\": <name>, \\"arguments\\": <object>}\\n</tool_call>{% endif %}'
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}"
    "{{ call.function.arguments.age }}>{% endfor %}{% endfor %}"
)
LLAMA = (
    '{% if tools %}{"name": function name, "parameters": dictionary of argument name}{% endif %}'
)
CODER = QWEN + "{# <function=name> <parameter=name> #}"
UNKNOWN = QWEN + "{# <function=name> #}"


def with_template(template):
    inner = tiny_tokenizer()
    inner.chat_template = template
    return Tokenizer(inner, [inner.eos_token_id])


def test_the_template_says_how_calls_are_written(tokenizer):
    known = [(QWEN, TAGGED), (LLAMA, BARE), (CODER, XML), (UNKNOWN, None), (None, None)]
    for template, syntax in known:
        assert native_syntax(with_template(template)) is syntax
    assert native_syntax(tokenizer) is None


CALLED = {
    "type": "function",
    "function": {"name": LOOK_CALL.name, "arguments": LOOK_CALL.arguments},
}
CONVERSATION = [
    {"role": "user", "content": "How old is abc?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", **CALLED}]},
    {"role": "tool", "tool_call_id": "1", "content": "3"},
    {"role": "tool", "tool_call_id": "2", "content": "4"},
]


@pytest.mark.parametrize("template", [QWEN, {"default": "", "tool_use": QWEN}, None])
def test_earlier_calls_need_no_tools_now(tokenizer, template):
    chosen = tokenizer if template is None else with_template(template)
    text = chosen.decode(encode_tool_chat(chosen, CONVERSATION, []))
    assert "TOOLS:" not in text
    assert "You may call" not in text
    assert ("<look3>" if template else written(LOOK_CALL)) in text


def test_tools_alone_are_no_conversation(tokenizer):
    with pytest.raises(RequestError, match="conversation is empty"):
        encode_tool_chat(tokenizer, [], TOOLS)


def test_a_template_that_knows_tools_gets_them():
    tokenizer = with_template(QWEN)
    text = tokenizer.decode(encode_tool_chat(tokenizer, CONVERSATION, TOOLS))
    assert text.startswith("TOOLS:" + json.dumps(LOOK))
    assert text.endswith("[user]How old is abc?[assistant]<look3>[tool]3[tool]4")


@pytest.mark.parametrize("system", ["Be brief.", None])
def test_other_templates_are_told_in_words(tokenizer, system):
    first = [] if system is None else [{"role": "system", "content": system}]
    text = tokenizer.decode(encode_tool_chat(tokenizer, [*first, *CONVERSATION], TOOLS))
    assert text.startswith("system\n" + (f"{system}\n\n" if system else ""))
    assert text.count("system\n") == 1
    assert json.dumps(LOOK["function"]) in text
    assert written(LOOK_CALL) in text
    assert (
        "user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>" in text
    )
    assert "tool\n" not in text


def test_a_template_without_system_messages_has_the_words_in_the_question():
    no_system = "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer = with_template(
        f"{{% for m in messages %}}{no_system}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
    )
    text = tokenizer.decode(encode_tool_chat(tokenizer, CONVERSATION, TOOLS))
    assert text.startswith("[user]You may call these functions")
    assert "</tool_response>.\n\nHow old is abc?[assistant]" in text
    system = {"role": "system", "content": "Be brief."}
    with pytest.raises(RequestError, match="no system"):
        encode_tool_chat(tokenizer, [system, *CONVERSATION], TOOLS)


@pytest.mark.parametrize("template", [QWEN, None])
@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "", "tool_calls": 3},
        {"role": "assistant", "content": "", "tool_calls": [3]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{"}}]},
        {"role": "tool", "content": None},
        {"role": "tool", "content": "3", "bogus": 1},
        "hello",
    ],
)
def test_malformed_calls_and_results_are_refused(tokenizer, template, message):
    chosen = tokenizer if template is None else with_template(template)
    with pytest.raises(RequestError):
        encode_tool_chat(chosen, [*CONVERSATION, message], TOOLS)
