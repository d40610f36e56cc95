"""The formats of calls over HTTP: the same parts in chats, responses, messages."""

import json
from typing import Any

import anthropic
import openai
import pytest
from transformers import AutoTokenizer, GenerationConfig

from blockdraft import Grammar
from blockdraft.server.shape import Shape
from blockdraft.text.call_syntax import marked
from tests.call_formats import BARE_PYTHON, FORMATS, TEMPLATES, written
from tests.schemas import SCHEMAS
from tests.serving import MODEL, running_server
from tests.small_llm import load_llm
from tests.tiny import tiny_drafter_folder, tiny_target_folder
from tests.tools import ToolCall

LOOK = {"name": "abc", "age": 3}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMAS["object"]}
ASK: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "the abc"}],
    "tools": [{"type": "function", "function": FUNCTION}],
    "temperature": 0,
    "max_tokens": 300,
}
KIND = {"type": "object", "properties": {"kind": {"enum": ["red"]}}, "required": ["kind"]}
RED = {"type": "json_schema", "json_schema": {"name": "a", "schema": KIND}}
RESPONSES_TOOL = {"type": "function", "strict": False, **FUNCTION}
TURNS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{{ m.thinking }}<|end|>"
    "{% endfor %}<|start|>assistant"
)
XML = "{% if tools %}<tool_call><function=a><parameter=b>{% endif %}" + TURNS
HARMONY = "{% if tools %}T{% endif %}{# <|channel|><|message|> message.thinking #}" + TURNS
MARKS = ["<|return|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"]


def serve(root, template, *, marks=(), ends=()):
    target, drafter = (
        tiny_target_folder(root, max_position_embeddings=2048),
        tiny_drafter_folder(root),
    )
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.add_special_tokens({"additional_special_tokens": list(marks)})
    tokenizer.chat_template = template
    if ends:
        tokenizer.eos_token = ends[0]
        ids = [tokenizer.convert_tokens_to_ids(mark) for mark in ends]
        GenerationConfig(eos_token_id=ids).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return running_server(load_llm((target, drafter), max_concurrency=4))


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("coder"), XML) as running:
        yield running


@pytest.fixture(scope="module")
def oss(tmp_path_factory):
    ends = ("<|return|>", "<|call|>")
    with serve(tmp_path_factory.mktemp("oss"), HARMONY, marks=MARKS, ends=ends) as running:
        yield running


@pytest.fixture(scope="module")
def marking(tmp_path_factory):
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    template = TURNS + "<think>{# </think> #}"
    with serve(tmp_path_factory.mktemp("marking"), template, marks=marks) as running:
        yield running


def answering(monkeypatch, lark):
    """Leave the target nothing but this to answer."""
    shape = Shape(Grammar.lark(f"start: {lark}"), "tools")
    monkeypatch.setattr("blockdraft.server.service.read_shape", lambda *_, **__: shape)


def chat(server, **more):
    """Thinking, text, calls and finish reason; the same streamed and not, drafted and plain."""
    body = {**ASK, **more}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(**body)
        plain = client.chat.completions.create(**body, extra_body={"num_draft_tokens": 0})
        with client.chat.completions.stream(**body) as stream:
            streamed = stream.get_final_completion()
    found = []
    for answer in (whole, plain, streamed):
        (choice,) = answer.choices
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        thinking = getattr(choice.message, "reasoning_content", None)
        found.append((thinking, choice.message.content or "", calls, choice.finish_reason))
    assert found[0] == found[1] == found[2]
    return found[0]


def blocks(server):
    """Of the same question by /v1/responses and /v1/messages: kinds of items, and of blocks."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
        answer = client.responses.create(
            model=MODEL, input="the abc", tools=[RESPONSES_TOOL], max_output_tokens=300
        )
    tool = {"name": "look", "input_schema": SCHEMAS["object"]}
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        message = client.messages.create(
            model=MODEL, messages=ASK["messages"], tools=[tool], max_tokens=300
        )
    calls = [b.input for b in message.content if b.type == "tool_use"]
    assert calls == [json.loads(i.arguments) for i in answer.output if i.type == "function_call"]
    return [item.type for item in answer.output], [block.type for block in message.content]


CODER_CALL = (
    "<tool_call>\n<function=look>\n<parameter=name>\nabc\n</parameter>\n"
    "<parameter=age>\n3\n</parameter>\n</function>\n</tool_call>"
)


def test_qwen3_coder_s_calls_are_found(coder, monkeypatch):
    answering(monkeypatch, json.dumps(f"Well.\n{CODER_CALL}"))
    assert chat(coder) == (None, "Well.\n", [("look", json.dumps(LOOK))], "tool_calls")
    assert blocks(coder) == (["message", "function_call"], ["text", "tool_use"])


def test_qwen3_coder_s_calls_are_made_where_they_must_be(coder):
    tools = [{"type": "function", "function": {"name": "look", "parameters": KIND}}]
    _, text, calls, end = chat(
        coder, tools=tools, tool_choice="required", parallel_tool_calls=False
    )
    assert (text, calls, end) == ("", [("look", '{"kind": "red"}')], "tool_calls")


def test_marks_that_are_special_tokens_are_seen(marking, monkeypatch):
    call = json.dumps(json.dumps({"name": "look", "arguments": LOOK}))
    answering(monkeypatch, f'"hm" </think> "Well." <tool_call> {call} </tool_call>')
    assert chat(marking) == ("hm", "Well.", [("look", json.dumps(LOOK))], "tool_calls")
    assert blocks(marking) == (
        ["reasoning", "message", "function_call"],
        ["thinking", "text", "tool_use"],
    )


def test_a_call_is_made_with_marks_that_are_special_tokens(marking):
    tools = [{"type": "function", "function": {"name": "look", "parameters": KIND}}]
    token_id = marking.service.tokenizer.backend.token_to_id
    thinking, text, calls, end = chat(
        marking,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        logit_bias={str(token_id("</think>")): 100.0},
    )
    assert (thinking, text, end) == (None, "", "tool_calls")
    assert calls == [("look", '{"kind": "red"}')]


CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
THOUGHT = f'{CHANNEL} "analysis" {MESSAGE} "hm" <|end|> <|start|> "assistant"'
OSS_CALL = (
    f'{CHANNEL} "commentary to=functions.look " <|constrain|> "json" {MESSAGE} '
    + json.dumps(json.dumps(LOOK))
)


def test_gpt_oss_s_channels_are_parted(oss, monkeypatch):
    answering(monkeypatch, f'{THOUGHT} {CHANNEL} "final" {MESSAGE} "abc"')
    assert chat(oss) == ("hm", "abc", [], "stop")
    assert blocks(oss) == (["reasoning", "message"], ["thinking", "text"])


def test_gpt_oss_s_calls_are_found(oss, monkeypatch):
    answering(monkeypatch, f"{THOUGHT} {OSS_CALL}")
    assert chat(oss) == ("hm", "", [("look", json.dumps(LOOK))], "tool_calls")
    assert blocks(oss) == (["reasoning", "function_call"], ["thinking", "tool_use"])


def test_gpt_oss_s_marks_are_nobody_else_s_affair(oss, monkeypatch):
    answering(monkeypatch, f'{CHANNEL} "final" {MESSAGE} "abc"')
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 60, "response_format": RED}
    assert oss.post("/v1/completions", **body).json()["choices"][0]["text"] == "finalabc"


def toward(server, letter):
    """Bias for a model that could otherwise think without end: a channel and its first letter."""
    token_id = server.service.tokenizer.backend.token_to_id
    return {"logit_bias": {str(token_id(token)): 60.0 for token in (CHANNEL, letter)}}


def test_gpt_oss_keeps_to_the_shape_of_its_answer(oss):
    for tools in (None, ASK["tools"]):
        thinking, text, calls, end = chat(
            oss, **toward(oss, "f"), tools=tools or openai.omit, response_format=RED
        )
        assert (thinking, json.loads(text), calls, end) == (None, {"kind": "red"}, [], "stop")


def test_gpt_oss_makes_the_calls_that_must_be_made(oss):
    tools = [{"type": "function", "function": {"name": "look", "parameters": KIND}}]
    named = {"type": "function", "function": {"name": "look"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in ("required", named, allowed):
        more = [{"type": "function", "function": {"name": "wait"}}] * (choice is allowed)
        _, text, calls, end = chat(oss, **toward(oss, "c"), tools=tools + more, tool_choice=choice)
        assert (text, end) == ("", "tool_calls")
        assert [(name, json.loads(text)) for name, text in calls] == [("look", {"kind": "red"})]


THINKING = ["<think>", "</think>"]
LOOKING, WAITING = ToolCall("look", json.dumps(LOOK)), ToolCall("wait", "{}")


@pytest.fixture(scope="module", params=FORMATS)
def other(request, tmp_path_factory):
    """A server of a model that thinks, and the syntax of its calls.

    The marks are special tokens, as many of them as the tiny vocabulary has room for.
    """
    syntax, template = FORMATS[request.param], TEMPLATES[request.param]
    root = tmp_path_factory.mktemp("other")
    marks = [*THINKING, *syntax.marks][:7]
    with serve(root, template + "[assistant]<think>{# </think> #}", marks=marks) as running:
        yield running, syntax


def test_other_formats_calls_are_found_behind_thinking_and_in_it(other, monkeypatch):
    server, syntax = other
    special = server.service.tokenizer.mark_ids((*THINKING, *syntax.marks))
    call = written(syntax, LOOKING)
    calls = [("look", LOOKING.arguments)]
    for text, thinking, content in (
        (f"hm{call}</think>Well.\n{call}", f"hm{call}", "Well.\n"),
        (f"hm\n{call}", "hm", ""),
    ):
        answering(monkeypatch, marked(text, special))
        assert chat(server) == (thinking, content, calls, "tool_calls")
    answering(monkeypatch, marked(f"</think>Well. {written(syntax, LOOKING, WAITING)}", special))
    tools = [*ASK["tools"], {"type": "function", "function": {"name": "wait"}}]
    both = [*calls, ("wait", "{}")]
    assert chat(server, tools=tools) == (None, "Well. ", both, "tool_calls")
    answering(monkeypatch, marked(f"</think>Well. {call}", special))
    assert blocks(server) == (["message", "function_call"], ["text", "tool_use"])


def test_other_formats_calls_are_made_where_they_must_be(other):
    server, _ = other
    end = server.service.tokenizer.backend.token_to_id("</think>")
    named = {"type": "function", "function": {"name": "look"}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": KIND}}]
    for choice in ("required", named):
        _, text, calls, reason = chat(
            server,
            tools=tools,
            tool_choice=choice,
            parallel_tool_calls=False,
            logit_bias={str(end): 100.0},
        )
        assert (text, reason) == ("", "tool_calls")
        assert [(name, json.loads(given)) for name, given in calls] == [("look", {"kind": "red"})]


def test_other_formats_calls_are_sent_back_on_every_route(other):
    server, syntax = other
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": LOOK}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "tall"}
    call = {"id": "call_1", "type": "function"}
    called = {**call, "function": {"name": "look", "arguments": json.dumps(LOOK)}}
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": json.dumps(LOOK)}
    output = {"type": "function_call_output", "call_id": "c", "output": "tall"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "call_1", "content": "tall"},
    ]
    counted = server.post("/tokenize", messages=messages, tools=ASK["tools"]).json()
    text = server.service.tokenizer.decode_all(counted["tokens"])
    assert syntax.openers[-1] in text
    assert "tall" in text
    usage = server.post("/v1/chat/completions", **{**ASK, "messages": messages, "max_tokens": 1})
    assert usage.json()["usage"]["prompt_tokens"] == counted["count"]
    answer = server.post(
        "/v1/responses",
        model=MODEL,
        input=[{"role": "user", "content": "the abc"}, item, output],
        tools=[{"type": "function", **FUNCTION}],
        max_output_tokens=1,
    )
    assert answer.json()["usage"]["input_tokens"] == counted["count"]
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMAS["object"]}
    message = server.post(
        "/v1/messages",
        model=MODEL,
        messages=[
            *ASK["messages"],
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ],
        tools=[tool],
        max_tokens=1,
    )
    read = message.json()["usage"]
    assert read["input_tokens"] + read["cache_read_input_tokens"] == counted["count"]


def test_python_s_calls_without_a_mark_are_found_and_made(tmp_path, monkeypatch):
    tools = [{"type": "function", "function": {"name": "look", "parameters": KIND}}]
    with serve(tmp_path, BARE_PYTHON) as server:
        for choice in ("required", {"type": "function", "function": {"name": "look"}}):
            _, text, calls, reason = chat(
                server, tools=tools, tool_choice=choice, parallel_tool_calls=False
            )
            assert (text, calls, reason) == ("", [("look", '{"kind": "red"}')], "tool_calls")
        refused = server.post(
            "/v1/chat/completions", **{**ASK, "tools": tools, "parallel_tool_calls": False}
        )
        assert refused.status_code == 400
        assert "no start mark" in refused.json()["error"]["message"]
        answering(monkeypatch, json.dumps("[look(name='abc', age=3)]"))
        assert chat(server) == (None, "", [("look", json.dumps(LOOK))], "tool_calls")
        assert blocks(server) == (["function_call"], ["tool_use"])
