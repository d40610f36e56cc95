"""litellm against a server: python litellm_client.py URL KEY MODEL; fails where something is off.

Runs in an environment that has litellm and needs nothing of ours.
"""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network

import litellm

url, key, model = sys.argv[1:]
SERVER = {"api_base": f"{url}/v1", "api_key": key, "num_retries": 0, "max_tokens": 40}
MESSAGES = [{"role": "user", "content": "Name three colors."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}}
CITY |= {"required": ["city"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "show_city", "parameters": CITY}}


def ask(**fields):
    fields = {"model": f"hosted_vllm/{model}", "messages": MESSAGES, "temperature": 0} | fields
    return litellm.completion(**SERVER | fields)


def fails(error, **fields):
    try:
        ask(**fields)
    except error as found:
        return str(found)
    raise AssertionError(f"{error.__name__} was not raised for {fields}")


def chat():
    whole = ask()
    text = whole.choices[0].message.content
    assert text
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert ask(extra_body={"num_draft_tokens": 0}).choices[0].message.content == text
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0

    async def batched():
        call = {"model": f"hosted_vllm/{model}", "messages": MESSAGES, "temperature": 0} | SERVER
        return await asyncio.gather(*(litellm.acompletion(**call) for _ in range(8)))

    assert {answer.choices[0].message.content for answer in asyncio.run(batched())} == {text}


def texts():
    fields = {"model": f"text-completion-openai/{model}", "prompt": "Once upon a time"}
    text = litellm.text_completion(**SERVER | fields, temperature=0)
    assert text.choices[0].text


def shapes():
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    assert set(json.loads(ask(response_format=shape).choices[0].message.content)) == {"city"}
    for choice in ("required", {"type": "function", "function": {"name": "show_city"}}):
        answer = ask(tools=[TOOL], tool_choice=choice, max_tokens=200)
        assert answer.choices[0].finish_reason == "tool_calls"
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "show_city"
        # litellm leaves out additionalProperties, so there may be more of them.
        assert "city" in json.loads(call.function.arguments)
        chunks = list(ask(tools=[TOOL], tool_choice=choice, max_tokens=200, stream=True))
        built = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls[0]
        assert (built.function.name, built.function.arguments) == (
            call.function.name,
            call.function.arguments,
        )
        result = {"role": "tool", "tool_call_id": call.id, "content": "shown"}
        turns = [*MESSAGES, answer.choices[0].message.model_dump(), result]
        assert ask(messages=turns, tools=[TOOL], tool_choice="none").choices[0].message.content


def errors():
    assert "temperature" in fails(litellm.BadRequestError, temperature=-1)
    fails(litellm.NotFoundError, model="hosted_vllm/gpt-9")
    fails(litellm.AuthenticationError, api_key="wrong")
    long = [{"role": "user", "content": "word " * 20_000}]
    fails(litellm.ContextWindowExceededError, messages=long)


for check in (chat, texts, shapes, errors):
    check()
    print(f"{check.__name__}: fine")  # noqa: T201 - what the test reads
