"""Calls as Mistral, DeepSeek and others write them: found, forced, and written back."""

import json
import random
from dataclasses import replace

import pytest

from blockdraft import RequestError
from blockdraft.text.call_parsers import call_parser
from blockdraft.text.call_syntax import (
    DEEPSEEK,
    DEEPSEEK_V31,
    KIMI,
    MISTRAL,
    MISTRAL_LIST,
    TAGGED,
    JsonSyntax,
    calls_grammar,
)
from blockdraft.text.grammar import Grammars
from blockdraft.text.python_syntax import LFM2, OLMO
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_calls import CallStart
from blockdraft.text.tool_prompt import encode_tool_chat, native_syntax
from blockdraft.text.tools import ToolChoice, parse_tools
from blockdraft.text.xml_calls import XmlCallParser
from blockdraft.text.xml_syntax import GLM, GLM_47, MINIMAX
from tests.call_formats import FORMATS, SPACED_LIST, TEMPLATES, TOOLS_SHOWN, V3, V31, inner, written
from tests.grammars import accepts
from tests.tiny import TEXT_VOCAB_SIZE, tiny_tokenizer
from tests.tools import TOOLS, WAIT, ToolCall, function, joined

AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
OLD, YOUNG, NONE = (ToolCall("look", f'{{"age": {age}}}') for age in (90, 3, '"x"'))
WAITING, SING = ToolCall("wait-2", "{}"), ToolCall("sing", "{}")
EXPECTED = {
    "list": '[TOOL_CALLS][{"name": "look", "arguments": {"age": 90}}, '
    '{"name": "wait-2", "arguments": {}}]',
    "spaced list": '[TOOL_CALLS] [{"name": "look", "arguments": {"age": 90}}, '
    '{"name": "wait-2", "arguments": {}}]',
    "mistral": '[TOOL_CALLS]look[ARGS]{"age": 90}[TOOL_CALLS]wait-2[ARGS]{}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    '{"age": 90}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>wait-2\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek 3.1": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"age": 90}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>wait-2<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    '<|tool_call_argument_begin|>{"age": 90}<|tool_call_end|><|tool_call_begin|>functions.wait-2:1'
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "glm": "<tool_call>look\n<arg_key>age</arg_key>\n<arg_value>90</arg_value>\n</tool_call>\n"
    "<tool_call>wait-2\n</tool_call>",
    "glm 4.7": "<tool_call>look<arg_key>age</arg_key><arg_value>90</arg_value></tool_call>"
    "<tool_call>wait-2</tool_call>",
    "lfm2": "<|tool_call_start|>[look(age=90), wait-2()]<|tool_call_end|>",
    "olmo": "<function_calls>look(age=90)\nwait-2()</function_calls>",
    "minimax": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="age">90</parameter>\n'
    '</invoke>\n<invoke name="wait-2">\n</invoke>\n</minimax:tool_call>',
}
"""Two calls, as each published template writes them."""


def parser_of(syntax):
    return call_parser(syntax, parse_tools([function(parameters=AGE), WAIT]))


def parsed(syntax, *texts, is_cut=False):
    parser = parser_of(syntax)
    found = [piece for text in texts for piece in parser.push(text)]
    found += parser.close(is_cut=is_cut)
    assert all(found)
    return joined(found)


SECTIONED = (DEEPSEEK, DEEPSEEK_V31, KIMI)
AND_SO = ', and "so"'


def unclosed(syntax, call):
    """A call without what closes it and the calls behind it."""
    if isinstance(syntax, JsonSyntax) and not syntax.is_object:
        syntax = replace(syntax, close="")
    return written(replace(syntax, end="", section_end=""), call)


every_format = pytest.mark.parametrize("syntax", FORMATS.values(), ids=FORMATS)


@pytest.mark.parametrize(("name", "text"), EXPECTED.items())
def test_each_format_is_the_published_one(name, text):
    assert written(FORMATS[name], OLD, WAITING) == text


@every_format
def test_calls_are_found_wherever_the_text_is_cut(syntax):
    text = f"Well.\n{written(syntax, OLD, YOUNG, WAITING)}"
    wanted = ["Well.\n", OLD, YOUNG, WAITING]
    assert parsed(syntax, *text) == wanted
    for cut in range(len(text)):
        assert parsed(syntax, text[:cut], text[cut:]) == wanted
    assert parsed(syntax, f"{text}\n") == wanted
    assert parsed(syntax, text + "Done.") == [*wanted, "Done."]


@every_format
def test_what_is_no_call_stays_text_word_for_word(syntax):
    opener = syntax.openers[0]
    for text in (written(syntax, SING), f"The mark {opener} is one.", f"{opener}look and see"):
        assert parsed(syntax, text) == [text]
        assert parsed(syntax, *text) == [text]
        after = written(syntax, OLD)
        assert parsed(syntax, f"{text}\n", after) == [f"{text}\n", OLD]


@every_format
def test_a_call_that_is_cut_off_leaves_its_arguments_and_no_mark(syntax):
    text = written(syntax, OLD)
    for length in range(1, len(text)):
        found = parsed(syntax, text[:length], is_cut=True)
        assert length == 1 or not any(isinstance(piece, str) for piece in found)
        assert all(OLD.arguments.startswith(call.arguments) for call in found if length > 1)
    parser = parser_of(syntax)
    parser.push(text[: text.index("90") + 1])
    parser.close(is_cut=True)
    assert not parser.are_whole


@every_format
def test_pieces_come_as_they_are_written(syntax):
    parser = parser_of(syntax)
    text = written(syntax, OLD)
    head, value = text.index("90"), text.index("90") + 2
    begun = parser.push(text[:head])
    assert begun[0] == CallStart("look")
    more = parser.push(text[head:value]) + parser.push(text[value:])
    assert "".join(piece.text for piece in [*begun[1:], *more]) == OLD.arguments
    assert parser.close() == []


@every_format
def test_pieces_do_not_depend_on_the_cuts_of_whatever_is_written(syntax):
    draw, num_with_calls = random.Random(0), 0
    marks = [*syntax.marks, syntax.begin, syntax.section, syntax.between, syntax.end]
    calls = [inner(syntax, call) for call in (OLD, WAITING, SING)]
    fragments = [
        *(*marks, *marks, *calls, *calls),
        *("look", "{", "}", "[", "]", ",", " ", "\n", '"', "```json", "functions.", ":1", "a", "<"),
    ]
    for _ in range(1500):
        begin = draw.choice(["", written(syntax, YOUNG), syntax.section + syntax.begin])
        text = begin + "".join(draw.choices(fragments, k=draw.randint(1, 12)))
        for is_cut in (False, True):
            whole = parsed(syntax, text, is_cut=is_cut)
            assert parsed(syntax, *text, is_cut=is_cut) == whole, text
        num_with_calls += any(isinstance(piece, ToolCall) for piece in whole)
    assert 400 < num_with_calls < 1400


@pytest.mark.parametrize(
    ("syntax", "text", "pieces"),
    [
        (MISTRAL_LIST, '[TOOL_CALLS] [ {"name":"look","arguments":{"age": 90}} ] ', [OLD]),
        (MISTRAL_LIST, '[TOOL_CALLS]{"name": "look", "arguments": {"age": 90}}', [OLD]),
        (MISTRAL_LIST, '[TOOL_CALLS][{"arguments": {"age": 90}, "name": "look"}]', [OLD]),
        (
            MISTRAL_LIST,
            '[TOOL_CALLS][{"arguments": {"age": 90}, "name": "look"},'
            '{"name": "look", "arguments": {"age": 3}, "id": "abc"}, {"name": "wait-2"}]!',
            [OLD, YOUNG, WAITING, "!"],
        ),
        *(
            (one, written(one, SING, *between, OLD), [*texts, OLD])
            for one in (MISTRAL_LIST, SPACED_LIST)
            for between, texts in (
                ((), [unclosed(one, SING)]),
                ((SING,), [f"{unclosed(one, SING)}, {inner(one, SING)}"]),
                ((YOUNG, SING), [unclosed(one, SING), YOUNG, f", {inner(one, SING)}"]),
            )
        ),
        (
            MISTRAL_LIST,
            f"[TOOL_CALLS][{inner(MISTRAL_LIST, SING)} , and {written(MISTRAL_LIST, OLD)}",
            [f"[TOOL_CALLS][{inner(MISTRAL_LIST, SING)} , and ", OLD],
        ),
        (MISTRAL_LIST, "".join(written(MISTRAL_LIST, c) for c in (OLD, WAITING)), [OLD, WAITING]),
        (MISTRAL, '[TOOL_CALLS]look[CALL_ID]a1B2c3D4e[ARGS]{"age": 90}', [OLD]),
        (
            MISTRAL,
            '[TOOL_CALLS] look [ARGS] {"age": 90} [TOOL_CALLS]wait-2[ARGS]{}',
            [OLD, WAITING],
        ),
        (MISTRAL, "[TOOL_CALLS]look[ARGS][1]", ["[TOOL_CALLS]look[ARGS][1]"]),
        (DEEPSEEK_V31, f"{written(replace(DEEPSEEK_V31, section_end=''), OLD)} So", [OLD, " So"]),
        (DEEPSEEK_V31, written(replace(DEEPSEEK_V31, section="", section_end=""), OLD), [OLD]),
        (DEEPSEEK_V31, written(replace(DEEPSEEK_V31, between="\n \n"), OLD, YOUNG), [OLD, YOUNG]),
        (DEEPSEEK, written(replace(DEEPSEEK, close=""), OLD, YOUNG), [OLD, YOUNG]),
        (KIMI, written(KIMI, OLD).replace(":0", ""), [OLD]),
        (KIMI, written(KIMI, OLD).replace(":0", ":12"), [OLD]),
        *((one, f"{unclosed(one, OLD)}, so", [OLD, ", so"]) for one in (*SECTIONED, MISTRAL)),
        *((one, f"{unclosed(one, OLD)}\n\nso", [OLD, "\n\nso"]) for one in (*SECTIONED, MISTRAL)),
        (KIMI, f"{unclosed(KIMI, OLD)},{KIMI.end}so", [OLD, "so"]),
        (
            MISTRAL_LIST,
            '[TOOL_CALLS][{"name": "look", "arguments": {"age": 90}, "id": "}b"}, '
            '{"name": "wait-2", "arguments": {}}]',
            [OLD, WAITING],
        ),
        *(
            (one, f'{opening}{{"name": "look", "arguments": {{"age": 90}}, and "so"', [OLD, AND_SO])
            for one, opening in ((MISTRAL_LIST, "[TOOL_CALLS]["), (TAGGED, "<tool_call>"))
        ),
        *((one, "<tool_call>look\nand so", ["<tool_call>look\nand so"]) for one in (GLM, GLM_47)),
        (GLM, "Say <tool_call>look <b>", ["Say <tool_call>look <b>"]),
        (GLM, written(GLM_47, OLD, WAITING), [OLD, WAITING]),
        (GLM, "<tool_call>\nlook\n<arg_key>age</arg_key><arg_value>90</arg_value>", None),
        (MINIMAX, written(MINIMAX, OLD, WAITING).replace("\n", ""), [OLD, WAITING]),
        (MINIMAX, f"So: {MINIMAX.begin}{inner(MINIMAX, OLD)}", ["So: ", OLD]),
        (MINIMAX, f"{unclosed(MINIMAX, OLD)}, so", [OLD, ", so"]),
        (MINIMAX, f"{MINIMAX.opening}{inner(MINIMAX, OLD)[:-9]}{MINIMAX.section_end}!", [OLD, "!"]),
        (
            MINIMAX,
            written(MINIMAX, SING, OLD),
            [f"{unclosed(MINIMAX, SING)}\n", OLD],
        ),
        (LFM2, "<|tool_call_start|> [ look ( age = 90 , ) , wait-2( ) ] !", [OLD, WAITING, " !"]),
        (LFM2, f"{LFM2.marks[0]}look(age=90){LFM2.marks[1]}so", [OLD, "so"]),
        (LFM2, f"{LFM2.marks[0]}[look(age=90) so", [OLD, " so"]),
        (LFM2, f"{LFM2.marks[0]}[look(90)] so", [f"{LFM2.marks[0]}[look(90)] so"]),
        (LFM2, written(LFM2, SING, OLD), [f"{LFM2.section}sing()", OLD]),
        (LFM2, written(LFM2, OLD, SING, YOUNG), [OLD, ", sing()", YOUNG]),
        (OLMO, "<function_calls>\nlook(age=90)\n\nwait-2()\n</function_calls>\n", [OLD, WAITING]),
        (
            OLMO,
            "<function_calls>look(age=90)\nlookout</function_calls>",
            [OLD, "\nlookout</function_calls>"],
        ),
        (OLMO, "Say <function_calls> or look(age=90)", ["Say <function_calls> or look(age=90)"]),
        (GLM, "look\n<arg_key>age</arg_key>", ["look\n<arg_key>age</arg_key>"]),
    ],
)
def test_other_spellings(syntax, text, pieces):
    wanted = [ToolCall("look", '{"age": 90')] if pieces is None else pieces
    assert parsed(syntax, text) == parsed(syntax, *text) == wanted


@pytest.mark.parametrize("name", ["list", "spaced list", "kimi", "glm"])
def test_white_space_that_json_does_not_have_is_the_same_in_pieces(name):
    syntax = FORMATS[name]
    for space in ("\x0b", "\xa0", "\u3000"):
        text = syntax.openers[0] + space + inner(syntax, OLD)
        assert parsed(syntax, text) == parsed(syntax, *text)


@pytest.mark.parametrize("syntax", [MISTRAL, DEEPSEEK_V31, KIMI], ids=["mistral", "3.1", "kimi"])
def test_another_name_is_handed_out_before_it_ends(syntax):
    parser = parser_of(syntax)
    text = f"{syntax.opening}{syntax.before}lookout"
    assert joined(parser.push(text)) == [text]


def test_a_text_in_glm_s_tags_stands_as_it_is():
    tools = parse_tools([function(parameters={"properties": {"name": {"type": "string"}}})])
    call = ToolCall("look", json.dumps({"name": '\n3 "<b>"\n'}))
    parser = XmlCallParser(tools, GLM.tags)
    assert joined([*parser.push(written(GLM, call)), *parser.close()]) == [call]


def marking(marks, template=None, *, kind="special"):
    """A tokenizer to which the marks are text, tokens of their own, or special tokens."""
    backend = tiny_tokenizer()
    if kind != "text":
        backend.add_tokens(list(marks), special_tokens=kind == "special")
    backend.chat_template = template
    return Tokenizer(backend, [backend.eos_token_id])


@pytest.fixture(scope="module", params=["text", "tokens", "special"])
def kind(request):
    """What the marks of calls are."""
    return request.param


STRICT = [function(strict=True, parameters=AGE), WAIT]
CHOICES = [
    ({"choice": ToolChoice("required")}, [[OLD], [WAITING, OLD, YOUNG]], [[], [SING], [NONE]]),
    ({"choice": ToolChoice("required"), "parallel": False}, [[WAITING]], [[OLD, YOUNG], [NONE]]),
    ({"choice": ToolChoice("required", "look")}, [[OLD]], [[WAITING], [OLD, OLD], [NONE]]),
    ({"choice": ToolChoice("auto")}, [[], [OLD], [OLD, WAITING]], [[SING], [NONE], [OLD, NONE]]),
    ({"choice": ToolChoice("auto"), "parallel": False}, [[], [OLD]], [[OLD, YOUNG], [NONE]]),
    (
        {"choice": ToolChoice("auto", allowed=frozenset({"look"}))},
        [[], [OLD], [OLD, YOUNG]],
        [[WAITING], [OLD, WAITING]],
    ),
]


@every_format
@pytest.mark.parametrize(("options", "good", "bad"), CHOICES)
def test_what_the_grammar_of_calls_accepts(syntax, kind, options, good, bad):
    tokenizer = marking(syntax.marks, kind=kind)
    special = tokenizer.mark_ids(syntax.marks)
    assert (len(tokenizer.encode(syntax.marks[0])) == 1) is (kind != "text")
    grammar = calls_grammar(parse_tools(STRICT), syntax=syntax, special=special, **options)
    grammars = Grammars(tokenizer, TEXT_VOCAB_SIZE + 8)
    is_free = options["choice"].mode == "auto"

    def fits(calls):
        texts = ("", "So: ") if is_free else ("",)
        return {
            accepts(grammars, tokenizer, grammar, text + (written(syntax, *calls) if calls else ""))
            for text in texts
        }

    assert [fits(calls) for calls in good] == [{True}] * len(good)
    assert [fits(calls) for calls in bad] == [{False}] * len(bad)
    if is_free and not options.get("parallel", True):
        assert accepts(grammars, tokenizer, grammar, written(syntax, OLD) + " Done.") is False


@every_format
def test_a_call_whose_mark_is_spelled_is_watched_too(syntax, kind):
    """A mark that is a token may be written letter by letter, and the parser takes it as one."""
    tokenizer = marking(syntax.marks, kind=kind)
    marks = tokenizer.mark_ids(syntax.marks)
    grammar = calls_grammar(parse_tools(STRICT), ToolChoice("auto"), syntax, special=marks)
    state = Grammars(tokenizer, TEXT_VOCAB_SIZE + 8).start(grammar)
    for opener in syntax.openers:
        opening = [one for letter in f"a{opener}" for one in tokenizer.encode(letter)]
        rest = syntax.opening.partition(opener)[2]
        for call, decisive, is_good in (
            (OLD, "90", True),
            (SING, "sing", False),
            (NONE, "x", False),
        ):
            text = rest + inner(syntax, call).partition(decisive)[0] + decisive
            ids = [*opening, *tokenizer.encode(text)]
            assert (state.num_allowed(ids[:1], ids[1:]) == len(ids) - 1) is is_good


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        (TAGGED, '<tool_call>{"name": "look", "arguments": {"age": "x"}}</tool_call>'),
        (MISTRAL_LIST, '[TOOL_CALLS]{"name": "look", "arguments": {"age": "x"}}'),
        (MISTRAL_LIST, '[TOOL_CALLS] [{"name": "look", "arguments": {"age": "x"}}]'),
        *((one, written(replace(one, section="", section_end=""), NONE)) for one in SECTIONED),
        (GLM, "<tool_call>\nlook<arg_key>age</arg_key><arg_value>x</arg_value></tool_call>"),
        (MINIMAX, written(MINIMAX, NONE).replace("\n", "")),
        (LFM2, '<|tool_call_start|>look(age="x")<|tool_call_end|>'),
        (OLMO, '<function_calls>\nlook(age="x")\n</function_calls>'),
    ],
)
def test_no_other_spelling_of_a_call_evades_its_schema(syntax, text):
    tokenizer = marking(())
    strict = parse_tools([function(strict=True, parameters=AGE), WAIT])
    assert [call.name for call in parsed(syntax, text)] == ["look"]
    grammar = calls_grammar(strict, ToolChoice("auto"), syntax)
    grammars = Grammars(tokenizer, TEXT_VOCAB_SIZE)
    assert not accepts(grammars, tokenizer, grammar, text)
    assert accepts(grammars, tokenizer, grammar, written(syntax, OLD))


def test_mistral_may_name_a_call(kind):
    tokenizer = marking(MISTRAL.marks, kind=kind)
    special = tokenizer.mark_ids(MISTRAL.marks)
    grammar = calls_grammar(TOOLS, ToolChoice("required"), MISTRAL, special=special)
    grammars = Grammars(tokenizer, TEXT_VOCAB_SIZE + 8)
    for call_id, is_good in (("a1B2c3D4e", True), ("a1B", False)):
        text = f"[TOOL_CALLS]wait-2[CALL_ID]{call_id}[ARGS]{{}}"
        assert accepts(grammars, tokenizer, grammar, text) is is_good


def test_an_end_of_a_text_that_is_spelled_is_its_end():
    """The parser would take what follows for another argument."""
    tokenizer = marking(GLM.marks)
    text = {"properties": {"name": {"type": "string"}}, "required": ["name"]}
    tools = parse_tools([function(parameters=text)])
    special = tokenizer.mark_ids(GLM.marks)
    grammar = calls_grammar(tools, ToolChoice("required"), GLM_47, special=special)
    state = Grammars(tokenizer, TEXT_VOCAB_SIZE + 8).start(grammar)
    ids = tokenizer.encode("<tool_call>look<arg_key>name</arg_key><arg_value>a")
    spelled = [one for letter in "</arg_value>" for one in tokenizer.encode(letter)]
    for rest, is_good in (("</tool_call>", True), ("b</arg_value></tool_call>", False)):
        path = [*spelled, *tokenizer.encode(rest)]
        assert (state.num_allowed(ids, path) == len(path)) is is_good


def test_texts_that_glm_s_tags_cannot_restrict_are_refused():
    schema = {"properties": {"name": {"type": "string", "maxLength": 3}}}
    tools = parse_tools([function(parameters=schema)])
    with pytest.raises(RequestError, match="a text with maxLength"):
        calls_grammar(tools, ToolChoice("required"), GLM)


def test_the_template_says_how_calls_are_written():
    for name, template in TEMPLATES.items():
        assert native_syntax(marking((), template)) == FORMATS[name]
    for template, syntax in (
        (TOOLS_SHOWN + V31, DEEPSEEK_V31),
        (TEMPLATES["glm"].replace(TOOLS_SHOWN, ""), None),
        (V3.replace("message['tool_calls']", "'tool_calls' in message"), DEEPSEEK),
        (V3.replace("message['tool_calls']", "message['content'] is none"), None),
    ):
        assert native_syntax(marking((), template)) == syntax


CALLED = [
    {"id": f"call_{age}", "type": "function", "function": {"name": "look", "arguments": text}}
    for age, text in ((90, OLD.arguments), (3, YOUNG.arguments))
]
CONVERSATION = [
    {"role": "user", "content": "How old?"},
    {"role": "assistant", "content": "So:", "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "call_3", "content": "young"},
    {"role": "tool", "tool_call_id": "call_90", "content": "old"},
    {"role": "assistant", "content": "", "tool_calls": CALLED[:1]},
    {"role": "tool", "tool_call_id": "call_90", "content": "still"},
]


SENT_BACK = {
    "list": (
        '[TOOL_CALLS][{"name": "look", "arguments": {"age": 90}, "id": "000000000"}, '
        '{"name": "look", "arguments": {"age": 3}, "id": "000000001"}]',
        "[tool]young<000000001>[tool]old<000000000>",
        "[tool]still<000000002>",
    ),
    "mistral": (
        '[TOOL_CALLS]look[CALL_ID]000000000[ARGS]{"age": 90}[TOOL_CALLS]look[CALL_ID]000000001',
        "[tool]young<000000001>[tool]old<000000000>",
        "[tool]still<000000002>",
    ),
    "kimi": (
        "[tool]young## Return of functions.look:1[tool]old## Return of functions.look:0",
        "[tool]still## Return of functions.look:2",
    ),
}
"""What the templates that want ids of their own kind make of the conversation."""


@pytest.mark.parametrize("name", FORMATS)
def test_what_clients_send_back_goes_into_the_template(name):
    syntax, tokenizer = FORMATS[name], marking((), TEMPLATES[name])
    text = tokenizer.decode(encode_tool_chat(tokenizer, CONVERSATION, TOOLS))
    if "list" not in name and syntax is not MISTRAL:
        assert f"[assistant]So:{written(syntax, OLD, YOUNG)}[tool]young" in text
    for part in SENT_BACK.get(name, ()):
        assert part in text
    is_described = syntax in (DEEPSEEK, DEEPSEEK_V31)
    assert text.startswith("[system]You may call" if is_described else "TOOLS:")
    if is_described:
        assert syntax.write("name", '{"argument": "value"}') + "[user]" in text
    assert "<tool_response>" not in text
    without = tokenizer.decode(encode_tool_chat(tokenizer, CONVERSATION, []))
    assert without.startswith("[user]How old?")


def test_deepseek_s_template_gets_the_type_that_a_client_left_out():
    tokenizer = marking((), V3)
    calls = [{**call, "type": None} for call in CALLED]
    turns = [CONVERSATION[0], {**CONVERSATION[1], "tool_calls": calls}]
    text = tokenizer.decode(encode_tool_chat(tokenizer, turns, TOOLS))
    assert text.endswith(written(DEEPSEEK, OLD, YOUNG))


@pytest.mark.parametrize(
    ("name", "end"),
    [("kimi", "3## Return of functions.look:0"), ("mistral", "3<000000000>"), ("glm", "3")],
)
def test_a_result_may_have_lost_its_call(name, end):
    tokenizer = marking((), TEMPLATES[name])
    result = {"role": "tool", "tool_call_id": "lost", "name": "look", "content": "3"}
    text = tokenizer.decode(encode_tool_chat(tokenizer, [CONVERSATION[0], result], []))
    assert text.endswith(f"[tool]{end}")
