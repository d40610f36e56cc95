"""Answers with a shape, through OpenAI's own package: schemas hold, calls parse."""

import json
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pytest

from tests.schemas import SCHEMAS
from tests.serve.pair import default_llm
from tests.serving import MODEL, running_server

pytestmark = [pytest.mark.slow, pytest.mark.model]

NUM_SCHEMAS = 30
NUM_REQUESTS = 300
AT_ONCE = 32
QUESTIONS = [
    "Describe a person.",
    "Give me an example.",
    "What comes to your mind?",
    "Answer briefly.",
    "Fill this in.",
]
PLACE = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather there.", "parameters": PLACE},
    },
    {
        "type": "function",
        "function": {
            "name": "point",
            "description": "What is at a point.",
            "parameters": SCHEMAS["object"],
        },
    },
]
PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
WEATHER = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client():
    with (
        running_server(default_llm(), max_waiting=NUM_REQUESTS, request_seconds=3600.0) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client.with_options(timeout=3600.0)


def ask(client, question, **fields):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        **{"model": MODEL, "messages": messages, "max_tokens": 400, "temperature": 0, **fields}
    )


def test_every_constrained_answer_is_valid(client):
    schemas = list(SCHEMAS.items())[:NUM_SCHEMAS]
    assert len(schemas) == NUM_SCHEMAS

    def answer(number):
        name, schema = schemas[number % NUM_SCHEMAS]
        question = QUESTIONS[number % len(QUESTIONS)]
        wanted = {"name": "answer", "schema": schema, "strict": True}
        found = ask(
            client,
            f"{question} ({name})",
            response_format={"type": "json_schema", "json_schema": wanted},
            temperature=0 if number % 2 else 1.0,
            seed=number,
        )
        (choice,) = found.choices
        assert choice.finish_reason == "stop", (name, choice)
        jsonschema.validate(json.loads(choice.message.content), schema)
        return found.usage.completion_tokens_details.accepted_prediction_tokens

    with ThreadPoolExecutor(AT_ONCE) as pool:
        accepted = list(pool.map(answer, range(NUM_REQUESTS)))
    assert sum(accepted) > 0


@pytest.mark.parametrize("choice", ["required", WEATHER])
def test_required_calls_parse(client, choice):
    for seed in range(5):
        found = ask(
            client,
            "How is the weather in Paris?",
            tools=TOOLS,
            tool_choice=choice,
            parallel_tool_calls=False,
            temperature=1.0,
            seed=seed,
        )
        message = found.choices[0].message
        assert found.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        (call,) = message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        assert choice != WEATHER or call.function.name == "weather"


def streamed_call(client):
    """Pieces of the arguments as the package hands them out, and the call made of them."""
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        max_tokens=400,
        temperature=0,
        tools=TOOLS,
        tool_choice=WEATHER,
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    kind = "tool_calls.function.arguments.delta"
    deltas = [event.arguments_delta for event in events if event.type == kind]
    assert not final.content
    (call,) = final.tool_calls
    return deltas, call.function


def test_a_conversation_with_a_tool(client):
    whole = ask(client, "How is the weather in Paris?", tools=TOOLS, tool_choice=WEATHER)
    message = whole.choices[0].message
    (call,) = message.tool_calls
    assert list(PLACE["properties"]) == list(json.loads(call.function.arguments))
    deltas, streamed = streamed_call(client)
    assert "".join(deltas) == streamed.arguments == call.function.arguments
    assert streamed.name == call.function.name
    assert len(deltas) > 1
    turns = [
        {"role": "user", "content": "How is the weather in Paris?"},
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."},
    ]
    for mode in ("auto", "none"):
        fields = {"messages": turns, "tools": TOOLS, "tool_choice": mode, "max_tokens": 40}
        answer = ask(client, "", **fields).choices[0]
        assert answer.message.content or answer.message.tool_calls


def test_free_answers_are_the_same_streamed_drafted_and_plain(client):
    def joined(**fields):
        stream = ask(client, QUESTIONS[0], tools=TOOLS, max_tokens=60, stream=True, **fields)
        return "".join(c.delta.content or "" for chunk in stream for c in chunk.choices)

    whole = ask(client, QUESTIONS[0], tools=TOOLS, max_tokens=60).choices[0].message.content or ""
    assert joined() == whole
    assert joined(extra_body={"num_draft_tokens": 0}) == whole
