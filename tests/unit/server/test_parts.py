"""The parts of an answer, in their order, however its text is cut."""

import random
from dataclasses import replace

import pytest

from blockdraft.server.calls import Call, CallFinder
from blockdraft.server.parts import MarkedParser, join_parts
from blockdraft.server.shape import Toolbox
from blockdraft.text.call_syntax import BARE, DEEPSEEK, DEEPSEEK_V31, KIMI, TAGGED
from blockdraft.text.tools import ToolChoice
from blockdraft.text.xml_syntax import XML
from tests.tools import LOOK_CALL, TOOLS, TWO_CALLS, WAIT_CALL, written

EOS = 7


def parts_of(pieces, *, thinks=None, syntax=TAGGED):
    finder = CallFinder(Toolbox(TOOLS, ToolChoice("auto"), syntax), frozenset({EOS}))
    parser = MarkedParser(thinks, finder)
    found = []
    for piece in pieces:
        join_parts(found, parser.feed(piece))
    join_parts(found, parser.close(EOS))
    named = [(p.index, p.name, p.arguments) if isinstance(p, Call) else p for p in found]
    ids = [p.id for p in found if isinstance(p, Call)]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    return named, parser.can_be_run


@pytest.mark.parametrize("seed", range(5))
def test_parts_stand_in_the_order_of_the_text(seed):
    text = f"<think>hm</think>Well.\n{TWO_CALLS} So.{TWO_CALLS}"
    draw, pieces, rest = random.Random(seed), [], text
    while rest:
        length = len(text) if not seed else draw.randint(1, 30 * seed)
        pieces.append(rest[:length])
        rest = rest[length:]
    calls = [(call.name, call.arguments) for call in (LOOK_CALL, WAIT_CALL)]
    numbered = [(index, *calls[index % 2]) for index in range(4)]
    expected = [("reasoning", "hm"), ("content", "Well.\n"), *numbered[:2]]
    expected += [("content", " So."), *numbered[2:]]
    assert parts_of(pieces, thinks=False) == (expected, True)


def test_without_marks_and_tools_all_is_content():
    parser = MarkedParser()
    assert parser.feed("<think>a") == [("content", "<think>a")]
    assert parser.feed("") == []
    assert parser.close(EOS) == []
    assert not parser.can_be_run


def test_thinking_without_an_end_ends_where_a_call_begins():
    look = (0, LOOK_CALL.name, LOOK_CALL.arguments)
    expected = [("reasoning", "hm"), look]
    for call in (written(LOOK_CALL), f"{written(LOOK_CALL)}\n"):
        assert parts_of([f"hm\n{call}"], thinks=True) == (expected, True)
        assert parts_of(list(f"<think>hm\n{call}"), thinks=False) == (expected, True)


def test_only_a_mark_can_begin_a_call_in_thinking():
    found = [Toolbox(TOOLS, ToolChoice("auto"), syntax).begins for syntax in (TAGGED, XML, BARE)]
    in_tags = (("<tool_call>", "<function="), ("<function=", ""))
    assert found == [(("<tool_call>", "{"),), in_tags, ()]


@pytest.mark.parametrize("syntax", [DEEPSEEK, DEEPSEEK_V31, KIMI], ids=["v3", "v3.1", "kimi"])
def test_a_call_that_lacks_the_begin_of_its_section_ends_the_thinking_too(syntax):
    look = (0, LOOK_CALL.name, LOOK_CALL.arguments)
    text = f"hm\n{written(LOOK_CALL, replace(syntax, section=''))}"
    for pieces in ([text], list(text)):
        assert parts_of(pieces, thinks=True, syntax=syntax) == ([("reasoning", "hm"), look], True)


def test_a_call_without_the_tag_around_it_ends_the_thinking_too():
    text = "hm\n<function=wait-2>\n</function>"
    for pieces in ([text], list(text)):
        found = parts_of(pieces, thinks=True, syntax=XML)
        assert found == ([("reasoning", "hm"), (0, "wait-2", "{}")], True)
