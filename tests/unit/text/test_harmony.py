"""The format of gpt-oss: channels parted however the text is cut, calls kept to their schema."""

import random
from dataclasses import replace

import pytest

from blockdraft import Grammar, RequestError
from blockdraft.text.detokenizer import Detokenizer
from blockdraft.text.grammar import Grammars
from blockdraft.text.harmony import HarmonySplitter, harmony_marks
from blockdraft.text.harmony_grammar import FREE_TEXT, harmony_grammar
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_calls import Arguments, CallStart
from blockdraft.text.tool_prompt import encode_tool_chat
from tests.grammars import accepts
from tests.tiny import tiny_tokenizer
from tests.tools import LOOK_CALL, NAMES, TOOLS, WAIT_CALL, ToolCall, in_pieces

MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
TEMPLATE = (
    "{% if tools %}TOOLS{% endif %}{% for m in messages %}<|start|>{{ m.role }}"
    "<|channel|>{{ m.thinking }}<|message|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.age }}{% endfor %}<|end|>"
    "{% endfor %}{# message.thinking #}<|start|>assistant"
)


def harmony_tokenizer():
    inner = tiny_tokenizer()
    inner.add_special_tokens({"additional_special_tokens": list(MARKS)})
    inner.chat_template = TEMPLATE
    return Tokenizer(inner, [inner.convert_tokens_to_ids(mark) for mark in MARKS[-2:]])


@pytest.fixture(scope="module")
def tokenizer():
    return harmony_tokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer, 320)


def thought(text):
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


def final(text):
    return f"<|channel|>final<|message|>{text}"


def call(name, arguments):
    header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
    return f"{header}<|message|>{arguments}"


def other_call(name, arguments):
    return f" to=functions.{name}<|channel|>commentary json<|message|>{arguments}"


LOOK, WAIT = call("look", LOOK_CALL.arguments), call("wait-2", "{}")
ANSWERS = [
    ("", []),
    ("Hello < there", [("content", "Hello < there")]),
    (final("abc"), [("content", "abc")]),
    (thought("hm") + final("a <|b|> c"), [("reasoning", "hm"), ("content", "a <|b|> c")]),
    (thought("a") + thought("b") + final("c"), [("reasoning", "a\n\nb"), ("content", "c")]),
    (thought("hm") + LOOK, [("reasoning", "hm"), LOOK_CALL]),
    (other_call("look", LOOK_CALL.arguments), [LOOK_CALL]),
    (
        "<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant" + LOOK,
        [("content", "Let me."), LOOK_CALL],
    ),
    (f"{LOOK}<|call|><|start|>assistant{WAIT}", [LOOK_CALL, WAIT_CALL]),
    (call("sing", "{}"), [("content", "{}")]),
    ("<|channel|>analysis to=python<|message|>1+1", [("reasoning", "1+1")]),
    (f"{thought('hm')}<|channel|>fin", [("reasoning", "hm")]),
    ("<|channel|>final<|message|>", []),
    ("Hi<|channel|>final<|message|>abc", [("content", "Hi\n\nabc")]),
    ("to=", [("content", "to=")]),
    (final("a <|en"), [("content", "a <|en")]),
    (final("a<|return|>"), [("content", "a")]),
]


def joined(pieces):
    found = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append(ToolCall(piece.name, ""))
        elif isinstance(piece, Arguments):
            last = found.pop()
            found.append(ToolCall(last.name, last.arguments + piece.text))
        elif found and isinstance(found[-1], tuple) and found[-1][0] == piece[0]:
            found[-1] = (piece[0], found[-1][1] + piece[1])
        else:
            found.append(piece)
    return found


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("text", "pieces"), ANSWERS)
@pytest.mark.parametrize("seed", range(4))
def test_channels_are_parted_however_the_text_is_cut(text, pieces, seed):
    splitter = HarmonySplitter(NAMES)
    found = [piece for part in in_pieces(text, seed) for piece in splitter.push(part)]
    found += splitter.close()
    assert joined(found) == pieces
    assert splitter.are_whole


FRAGMENTS = [
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "assistant", "final"),
    *("analysis", "commentary", " to=functions.look", " ", "{}", "{", "a", "<|", "to=", "\n"),
]


@pytest.mark.parametrize("is_cut", [True, False])
def test_pieces_do_not_depend_on_the_cuts_of_whatever_is_written(is_cut):
    draw, num_with_calls = random.Random(0), 0
    for _ in range(3000):
        begin = draw.choice(["", call("look", "{")])
        text = begin + "".join(draw.choices(FRAGMENTS, k=draw.randint(1, 14)))
        at_once, bit_by_bit = HarmonySplitter(NAMES), HarmonySplitter(NAMES)
        whole = joined([*at_once.push(text), *at_once.close(is_cut=is_cut)])
        bits = [piece for letter in text for piece in bit_by_bit.push(letter)]
        assert joined([*bits, *bit_by_bit.close(is_cut=is_cut)]) == whole, text
        assert at_once.are_whole is bit_by_bit.are_whole
        num_with_calls += any(isinstance(piece, ToolCall) for piece in whole)
    assert num_with_calls > 1000


@pytest.mark.parametrize(
    ("text", "is_cut", "are_whole"),
    [(LOOK, False, True), (LOOK, True, False), (LOOK[:-1], False, False), (WAIT, False, True)],
)
def test_arguments_that_are_no_object_are_told(text, is_cut, are_whole):
    splitter = HarmonySplitter(NAMES)
    splitter.push(text)
    splitter.close(is_cut=is_cut)
    assert splitter.are_whole is are_whole


def test_text_is_handed_out_as_soon_as_it_is_certain():
    splitter = HarmonySplitter(NAMES)
    assert splitter.push("<|channel|>analysis<|message|>Well <") == [("reasoning", "Well ")]
    assert splitter.push("b> <|end|><|start|>assistant") == [("reasoning", "<b> ")]
    assert splitter.push("<|channel|>commentary to=functions.look <|constrain|>json") == []
    assert splitter.push('<|message|>{"a') == [CallStart("look"), Arguments('{"a')]


def test_the_template_says_who_writes_this_format(tokenizer):
    marks = harmony_marks(tokenizer)
    assert {tokenizer.decode_all([one]) for one in marks} >= set(MARKS[:4])
    assert not harmony_marks(Tokenizer(tiny_tokenizer(), [0]))


def test_marks_are_shown_where_they_are_asked_for(tokenizer):
    text = thought("h\u00e9") + final("abc")
    ids = tokenizer.encode(text)
    for marks, expected in ((harmony_marks(tokenizer), text), (frozenset(), None)):
        detokenizer = Detokenizer(tokenizer, shown_ids=marks)
        for one in ids:
            detokenizer.push(one)
        detokenizer.close()
        assert detokenizer.text == (expected or tokenizer.decode(ids))


def test_the_template_gets_tools_and_thinking(tokenizer):
    arguments = {"name": "look", "arguments": LOOK_CALL.arguments}
    made = {"id": "1", "type": "function", "function": arguments}
    turns = [
        {"role": "user", "content": "abc?"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "hm", "tool_calls": [made]},
        {"role": "tool", "content": "3", "tool_call_id": "1"},
        {"role": "assistant", "content": "So.", "reasoning_content": "ah"},
    ]
    text = tokenizer.decode_all(encode_tool_chat(tokenizer, turns, TOOLS))
    assert text.startswith("TOOLS")
    assert "<|channel|>hm\n\nWell.<|message|>3<|end|>" in text
    assert "<|channel|>ah<|message|>So.<|end|>" in text


RED = Grammar.choice(["red", "blue"])


@pytest.mark.parametrize(
    ("ending", "tools", "good", "bad"),
    [
        (RED, (), [final("red"), thought("hm") + final("blue")], [final("green"), "red", LOOK]),
        (
            None,
            TOOLS,
            [LOOK, thought("a") + thought("b") + WAIT, other_call("wait-2", "{}")],
            [final("red"), call("sing", "{}"), call("look", '{"name": 3}'), thought("hm")],
        ),
        (RED, TOOLS, [LOOK, final("red")], [final("green"), call("look", "{}")]),
        (FREE_TEXT, TOOLS, [LOOK, final("whatever it is")], [call("look", "{}"), "Hello"]),
    ],
)
def test_what_the_grammar_accepts(grammars, tokenizer, ending, tools, good, bad):
    grammar = harmony_grammar(ending, tools)
    assert [accepts(grammars, tokenizer, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammars, tokenizer, grammar, text) for text in bad] == [False] * len(bad)


def test_a_schema_that_cannot_be_followed_is_refused(tokenizer):
    wrong = replace(TOOLS[0], parameters={"type": "object", "properties": {"a": {"type": "foo"}}})
    with pytest.raises(RequestError, match="Invalid type: foo"):
        Grammars(tokenizer, 320).compile(harmony_grammar(None, [wrong]))
