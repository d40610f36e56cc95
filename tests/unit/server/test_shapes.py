"""`response_format` and `tools` over HTTP: every answer has its shape, streamed or not."""

import json
from typing import Any

import jsonschema
import pytest

from blockdraft.core.thinking import ALL_TAGS, THINK
from blockdraft.server.protocol import ChatRequest
from blockdraft.server.shape import read_shape, read_toolbox
from blockdraft.text.call_syntax import TAGGED
from blockdraft.text.grammar import Grammars
from blockdraft.text.tokenizer import Tokenizer
from blockdraft.text.tool_calls import ToolCallParser
from tests.grammars import accepts
from tests.grammars import grammars as grammars
from tests.grammars import tokenizer as tokenizer
from tests.schemas import SCHEMAS
from tests.serving import chat_body, running_server, saying
from tests.small_llm import load_llm
from tests.tiny import (
    TEXT_VOCAB_SIZE,
    tiny_tokenizer,
)

START, END = THINK
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
LONG = {"max_tokens": 200, "ignore_eos": False}
TEMPERATURES = [{}, {"temperature": 1.0, "seed": 5, "n": 2}]


@pytest.fixture(scope="module")
def folders(long_folders):
    return long_folders


def as_format(name):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMAS[name]}}


def declared(name, schema, **more):
    parameters = SCHEMAS[schema]
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [declared("look", "object"), declared("find", "nested"), declared("wait", "empty object")]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def named(name):
    return {"type": "function", "function": {"name": name}}


def whole(server, **fields: Any):
    """Of each choice: content, reasoning, calls, finish reason."""
    response = server.chat(**fields)
    assert response.status_code == 200, response.text
    found = []
    for choice in response.json()["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls", [])
        assert all(set(call) == {"id", "type", "function"} for call in calls)
        assert len({call["id"] for call in calls}) == len(calls)
        functions = [call["function"] for call in calls]
        assert all(set(function) == {"name", "arguments"} for function in functions)
        assert (message["content"] is None) <= bool(calls)
        text, reasoning = message["content"] or "", message.get("reasoning_content", "")
        found.append((text, reasoning, functions, choice["finish_reason"]))
    return found


def streamed(server, **fields: Any):
    """The same, put together from deltas as OpenAI's clients do it."""
    texts: dict[int, list[Any]] = {}
    for event in server.events(CHAT, **chat_body(**fields)):
        for choice in event["choices"]:
            found = texts.setdefault(choice["index"], ["", "", [], None])
            delta = choice["delta"]
            found[0] += delta.get("content") or ""
            found[1] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if call["index"] == len(found[2]):
                    assert call["id"].startswith("call_")
                    assert call["type"] == "function"
                    found[2].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert set(call) == {"index", "function"}
                    assert set(call["function"]) == {"arguments"}
                found[2][call["index"]]["arguments"] += call["function"]["arguments"]
            found[3] = choice["finish_reason"] or found[3]
    return [tuple(texts[index]) for index in sorted(texts)]


def everyway(server, **fields: Any):
    """The answer, which must be the same streamed and not, drafted and plain."""
    found = whole(server, **fields)
    assert streamed(server, **fields) == found
    assert streamed(server, **fields, num_draft_tokens=0) == found
    return found


@pytest.mark.parametrize("fields", TEMPERATURES)
@pytest.mark.parametrize("name", ["any of", "quotes in names"])
def test_an_answer_has_the_schema_that_was_asked_for(server, name, fields):
    for text, _, calls, end in everyway(server, response_format=as_format(name), **LONG, **fields):
        jsonschema.validate(json.loads(text), SCHEMAS[name])
        assert (calls, end) == ([], "stop")


def test_a_text_has_the_schema_that_was_asked_for(server):
    fields = {**LONG, "response_format": as_format("object"), "temperature": 1.0, "seed": 3}
    prompts = ["abc", "the fox"]
    texts = [choice["text"] for choice in server.complete(prompts, **fields).json()["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS["object"])
    pieces = ["", ""]
    for event in server.events(TEXT, prompt=prompts, **fields):
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["text"]
    assert pieces == texts


def test_any_object_will_do(server):
    bias = {str(server.service.tokenizer.encode("}")[0]): 20.0}
    fields = {"response_format": {"type": "json_object"}, "logit_bias": bias, **LONG}
    ((text, *_),) = everyway(server, **fields)
    assert isinstance(json.loads(text), dict)


def allowed(mode, *names):
    tools = [named(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


CHOICES = [
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": named("find")},
    {"tool_choice": allowed("required", "find", "wait"), "parallel_tool_calls": False},
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("fields", TEMPERATURES)
@pytest.mark.parametrize("choice", CHOICES)
def test_calls_that_are_required_are_made(server, choice, fields):
    wanted = {**LONG, **choice, **fields}
    for text, _, calls, end in everyway(server, tools=TOOLS, **wanted):
        assert (text, bool(calls)) == ("", True)
        assert end in ("tool_calls", "length")
        if choice != CHOICES[0]:  # else calls may follow each other without end
            assert len(calls) == 1
        for call in calls:
            assert choice != CHOICES[2] or call["name"] == "find"
            assert choice != CHOICES[3] or call["name"] != "look"
        for call in calls if end == "tool_calls" else calls[:-1]:  # the last one is cut off
            jsonschema.validate(json.loads(call["arguments"]), PARAMETERS[call["name"]])


def test_a_call_that_is_cut_has_the_arguments_so_far(server):
    fields = {"tools": TOOLS, "tool_choice": named("find"), "ignore_eos": False}
    ((_, _, (call,), end),) = everyway(server, **fields, max_tokens=400)
    assert end == "tool_calls"
    seen = set()
    for max_tokens in range(1, 120, 25):
        ((text, _, calls, end),) = everyway(server, **fields, max_tokens=max_tokens)
        assert (text, end) == ("", "length")
        assert all(call["arguments"].startswith(half["arguments"]) for half in calls)
        seen.update(half["arguments"] for half in calls)
    assert len(seen) > 2


def test_arguments_are_streamed_while_they_are_written(server):
    fields = {"tools": TOOLS, "tool_choice": named("find"), "max_tokens": 400, "ignore_eos": False}
    events = server.events(CHAT, **chat_body(**fields))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    pieces = [call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", [])]
    ((_, _, (call,), _),) = whole(server, **fields)
    assert "".join(pieces) == call["arguments"]
    # A step commits a block at most, and the model's tokens are single bytes.
    assert max(map(len, pieces)) <= 1 + server.service.model.max_draft_depth < len(pieces)


def test_the_model_is_told_of_tools_unless_it_may_call_none(server):
    def num_prompt(**fields):
        answer = server.chat(**fields, max_tokens=1, ignore_eos=False)
        return answer.json()["usage"]["prompt_tokens"]

    plain = num_prompt()
    assert num_prompt(tools=TOOLS, tool_choice="none") == plain
    told = num_prompt(tools=TOOLS)
    assert told > plain + 100
    messages = chat_body()["messages"]
    assert server.post("/tokenize", messages=messages, tools=TOOLS).json()["count"] == told
    # A prefix with all tools stays in the cache, whichever of them are allowed.
    assert num_prompt(tools=TOOLS, tool_choice=allowed("auto", "wait")) == told


def test_a_model_that_begins_a_call_makes_an_allowed_one(server):
    """A bias leads it to begin one, instead of an object in the format."""
    begin = server.service.tokenizer.encode("<")[0]
    fields = {"tools": TOOLS, "response_format": as_format("object"), "parallel_tool_calls": False}
    wanted = {**fields, **LONG, "logit_bias": {str(begin): 50.0}}
    for name in ("wait", "find"):
        ((text, _, (call,), _),) = everyway(server, **wanted, tool_choice=allowed("auto", name))
        assert (text, call["name"]) == ("", name)


def test_an_answer_of_auto_may_be_free_text(server):
    ((text, _, calls, _),) = everyway(server, tools=TOOLS)
    assert text
    assert calls == []


def written(name, arguments):
    return TAGGED.write(name, arguments)


LOOK = '{"name": "abc", "age": 3}'
TRICKY = '{"name": "</tool_call>", "age": 3}'
TWO = f"{written('look', TRICKY)}\n{written('wait', '{}')}"
BOTH = [{"name": "look", "arguments": TRICKY}, {"name": "wait", "arguments": "{}"}]
SAID = [
    (f"Well.\n{TWO}", "Well.\n", BOTH, "tool_calls"),
    (f"{TWO} Done.", " Done.", BOTH, "tool_calls"),
    (written("sing", "{}"), written("sing", "{}"), [], "stop"),
    ("a < b <tool", "a < b <tool", [], "stop"),
    (written("look", "[1]"), written("look", "[1]"), [], "stop"),
    (written("look", "{no}"), "", [{"name": "look", "arguments": "{no}"}], "stop"),
    (
        f'<tool_call>{TAGGED.before}look{TAGGED.behind}{{"a',
        "",
        [{"name": "look", "arguments": '{"a'}],
        "stop",
    ),
]


@pytest.mark.parametrize(("said", "text", "calls", "end"), SAID)
def test_calls_are_found_in_a_free_answer(server, monkeypatch, said, text, calls, end):
    saying(monkeypatch, said)
    assert everyway(server, tools=TOOLS, **LONG) == [(text, "", calls, end)]


CUT = [('"arg', []), ('"age"', [{"name": "look", "arguments": '{"name": "abc", '}])]


@pytest.mark.parametrize(("stop", "calls"), CUT)
def test_a_stop_string_cuts_a_call_too(server, monkeypatch, stop, calls):
    saying(monkeypatch, f"Well.{written('look', LOOK)}")
    fields = {"tools": TOOLS, "max_tokens": 400, "ignore_eos": False, "stop": [stop]}
    assert everyway(server, **fields) == [("Well.", "", calls, "stop")]


def test_no_piece_of_a_call_leaks_into_the_content_of_a_stream(server, monkeypatch):
    """The check must fail for a server that sends text as it comes."""
    saying(monkeypatch, TWO)
    assert streamed(server, tools=TOOLS, **LONG)[0][0] == ""
    monkeypatch.setattr(ToolCallParser, "push", lambda self, text: [text])
    assert "<tool_call>" in streamed(server, tools=TOOLS, **LONG)[0][0]


def test_results_go_back_to_the_model(server):
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "call_1", **named("look")}],
    }
    message["tool_calls"][0]["function"] = {"name": "look", "arguments": LOOK}
    result = {"role": "tool", "tool_call_id": "call_1", "name": "look", "content": "three"}
    turns = [*chat_body()["messages"], message, result]
    for fields in ({"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {}):
        assert server.post(CHAT, **{**chat_body(), **fields, "messages": turns}).is_success
    tokens = server.post("/tokenize", messages=turns).json()["tokens"]
    text = server.post("/detokenize", tokens=tokens).json()["prompt"]
    assert written("look", LOOK) in text
    assert "<tool_response>\nthree\n</tool_response>" in text


TOOLBOXES = [
    ({"tool_choice": "required"}, written("wait", "{}"), "Hello"),
    ({"tool_choice": named("wait")}, written("wait", "{}"), TWO),
    ({"tool_choice": allowed("required", "wait")}, written("wait", "{}"), TWO),
    ({"tool_choice": allowed("auto", "wait")}, f"So: {written('wait', '{}')}", TWO),
    ({"parallel_tool_calls": False}, "Hello", f"{written('wait', '{}')}{written('wait', '{}')}"),
    ({}, None, None),
]


@pytest.mark.parametrize(("fields", "good", "bad"), TOOLBOXES)
def test_calls_stand_behind_the_thinking(grammars, tokenizer, fields, good, bad):
    request = ChatRequest.model_validate({**chat_body(), "tools": TOOLS, **fields})
    toolbox = read_toolbox(request, tokenizer)
    for thinks, thoughts in ((True, f"a {written('x', '{')} {END}"), (False, f"{START}b{END}\n\n")):
        shape = read_shape(request, toolbox, thinks=thinks)
        if good is None:
            assert shape is None
            continue
        assert shape.param == "tools"
        assert accepts(grammars, tokenizer, shape.grammar, f"{thoughts}{good}")
        assert not accepts(grammars, tokenizer, shape.grammar, f"{thoughts}{bad}")
        assert accepts(grammars, tokenizer, shape.grammar, good) is not thinks


XML_WAIT = "<tool_call>\n<function=wait>\n</function>\n</tool_call>"


@pytest.mark.parametrize(("fields", "good", "bad"), TOOLBOXES)
@pytest.mark.parametrize("template", ["", "{{ tools }}<tool_call><function=<parameter="])
@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("tags", ALL_TAGS, ids=["think", "Magistral"])
def test_marks_that_are_tokens_are_written_as_such(fields, good, bad, template, is_special, tags):
    inner = tiny_tokenizer()
    inner.add_tokens([*tags, *TAGGED.marks], special_tokens=is_special)
    start, end = tags
    inner.chat_template = f"{template}{{# {end} #}}"
    marking = Tokenizer(inner, [inner.eos_token_id])
    # Texts with a length cannot be kept in tags.
    tools = [declared(name, "empty object") for name in PARAMETERS] if template else TOOLS
    request = ChatRequest.model_validate({**chat_body(), "tools": tools, **fields})
    toolbox = read_toolbox(request, marking)
    special = marking.thinking_ids
    # A grammar takes added tokens in square brackets for text.
    are_named = is_special or tags == THINK
    assert set(special) == (set(tags) if are_named else set())
    assert (marking.thinking_tags, set(toolbox.mark_ids)) == (tags, set(TAGGED.marks))
    assert len(marking.without_text(special.values())) == 2 * is_special
    grammars = Grammars(marking, TEXT_VOCAB_SIZE)
    if template and good is not None:
        good, bad = (text.replace(written("wait", "{}"), XML_WAIT) for text in (good, bad))
    for thinks, thoughts in ((True, f"a{end}"), (True, end), (False, f"{start}b{end}\n\n")):
        shape = read_shape(request, toolbox, thinks=thinks, tags=tags, special=special)
        if good is None:
            assert shape is None
            continue
        assert accepts(grammars, marking, shape.grammar, f"{thoughts}{good}")
        assert not accepts(grammars, marking, shape.grammar, f"{thoughts}{bad}")
        assert accepts(grammars, marking, shape.grammar, good) is not thinks


@pytest.mark.parametrize("is_special", [True, False], ids=["special", "added"])
@pytest.mark.parametrize("thinks", [True, False])
def test_thinking_ends_where_its_end_is_spelled_though_it_is_a_token(is_special, thinks):
    inner = tiny_tokenizer()
    inner.add_tokens(list(THINK), special_tokens=is_special)
    inner.chat_template = END
    marking = Tokenizer(inner, [inner.eos_token_id])
    request = ChatRequest.model_validate(
        {**chat_body(), "structured_outputs": {"choice": ["yes"]}},
    )
    shape = read_shape(request, None, thinks=thinks, special=marking.thinking_ids)
    grammars = Grammars(marking, TEXT_VOCAB_SIZE)

    def fits(behind):
        begin = [] if thinks else marking.encode(START)
        parts = ["hm</thi", "nk>", *behind]
        path = [*begin, *(i for part in parts for i in marking.encode_continuation(part))]
        return grammars.start(shape.grammar).num_allowed([], path) == len(path)

    assert fits(["yes"])
    assert not fits(["no", END, "yes"])


def test_a_schema_holds_behind_the_thinking(grammars, tokenizer):
    wanted = ChatRequest.model_validate({**chat_body(), "response_format": as_format("object")})
    begun, free = (read_shape(wanted, None, thinks=thinks).grammar for thinks in (True, False))
    assert accepts(grammars, tokenizer, begun, f"hm \n</thin{END}\n{LOOK}")
    assert accepts(grammars, tokenizer, free, f"{START}hm{END}\n\n{LOOK}")
    assert accepts(grammars, tokenizer, free, LOOK)
    assert not accepts(grammars, tokenizer, begun, LOOK)
    assert not accepts(grammars, tokenizer, begun, f"hm{END}hm{LOOK}")
    assert not accepts(grammars, tokenizer, free, f"hm{END}{LOOK}")


EITHER = [
    ({}, [written("wait", "{}"), f"{written('wait', '{}')}\n{written('wait', '{}')}", LOOK]),
    ({"parallel_tool_calls": False}, [written("wait", "{}"), LOOK]),
    ({"tool_choice": "required"}, [written("wait", "{}")]),
    ({"tool_choice": allowed("auto", "wait")}, [written("wait", "{}"), LOOK]),
    ({"tool_choice": allowed("auto", "find")}, [LOOK]),
    ({"tool_choice": "none"}, [LOOK]),
]


@pytest.mark.parametrize(("fields", "good"), EITHER)
def test_with_tools_and_a_format_the_answer_is_a_call_or_has_the_shape(
    grammars, tokenizer, fields, good
):
    format_ = {"response_format": as_format("object")}
    request = ChatRequest.model_validate({**chat_body(), "tools": TOOLS, **format_, **fields})
    toolbox = read_toolbox(request, tokenizer)
    free, begun = (read_shape(request, toolbox, thinks=thinks).grammar for thinks in (None, True))
    for text in good:
        assert accepts(grammars, tokenizer, free, text)
        assert accepts(grammars, tokenizer, begun, f"hm{END}{text}")
        assert not accepts(grammars, tokenizer, begun, text)
    bad = {"Hello", TWO, written("look", "{}"), f"{LOOK}{LOOK}", written("wait", "{}"), LOOK}
    for text in bad - set(good):
        assert not accepts(grammars, tokenizer, free, text)


@pytest.mark.parametrize("text", [written("wait", "{}"), LOOK])
def test_a_call_or_the_shape_comes_over_http(server, text):
    """A bias leads the model to either of the two."""
    first = server.service.tokenizer.encode(text[0])[0]
    fields = {"tools": TOOLS, "response_format": as_format("object"), "parallel_tool_calls": False}
    wanted = {**fields, **LONG, "max_tokens": 600, "logit_bias": {str(first): 50.0}}
    ((content, _, calls, end),) = everyway(server, **wanted)
    if text == LOOK:
        jsonschema.validate(json.loads(content), SCHEMAS["object"])
        assert (calls, end) == ([], "stop")
    else:
        (call,) = calls
        jsonschema.validate(json.loads(call["arguments"]), PARAMETERS[call["name"]])
        assert (content, end) == ("", "tool_calls")


@pytest.mark.parametrize("tags", ALL_TAGS, ids=["think", "Magistral"])
def test_thinking_call_and_text_come_apart(folders, monkeypatch, tags):
    llm = load_llm(folders)
    llm.tokenizer._tokenizer.chat_template += f"{tags[0]}{{# {tags[1]} #}}"
    saying(monkeypatch, f"hm {written('wait', '{}')} \n{tags[1]}\n\n{written('look', LOOK)}")
    calls = [{"name": "look", "arguments": LOOK}]
    with running_server(llm) as server:
        found = everyway(server, tools=TOOLS, **LONG)
        assert found == [("", f"hm {written('wait', '{}')}", calls, "tool_calls")]
        saying(monkeypatch, f"hm\n{written('look', LOOK)}")
        assert everyway(server, tools=TOOLS, **LONG) == [("", "hm", calls, "tool_calls")]
