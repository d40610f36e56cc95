"""OpenAI's own package against the server: typed answers, streams, errors."""

import openai
import pytest

from tests.serve.pair import default_llm
from tests.serving import MODEL, running_server

pytestmark = [pytest.mark.slow, pytest.mark.model]

MESSAGES = [{"role": "user", "content": "Name three colors."}]
KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def client():
    with (
        running_server(default_llm(), api_keys=(KEY,)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client,
    ):
        yield client


def ask(client, **fields):
    return client.chat.completions.create(
        **{"model": MODEL, "messages": MESSAGES, "max_tokens": 40, "temperature": 0, **fields}
    )


def test_chat_streamed_or_not(client):
    whole = ask(client)
    assert whole.choices[0].message.content
    assert whole.usage.completion_tokens_details.accepted_prediction_tokens >= 0
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    pieces = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs_and_samples(client):
    answer = ask(client, logprobs=True, top_logprobs=3, n=2, temperature=1.0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_our_own_fields_go_into_the_extra_body(client):
    plain = ask(client, extra_body={"num_draft_tokens": 0, "top_k": 50})
    drafted = ask(client, extra_body={"top_k": 50})
    assert plain.choices[0].message.content == drafted.choices[0].message.content
    assert plain.usage.completion_tokens_details.rejected_prediction_tokens == 0


def test_texts_and_models(client):
    fields = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(**fields, echo=True, logprobs=1)
    assert text.choices[0].text.startswith("Once upon a time")
    assert text.choices[0].logprobs.token_logprobs[0] is None
    pieces = client.completions.create(**fields, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in pieces)
    assert text.choices[0].text == "Once upon a time" + streamed
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_are_the_package_s_own(client):
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt-9")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))
    with pytest.raises(openai.BadRequestError) as too_long:
        ask(client, messages=[{"role": "user", "content": "word " * 20_000}])
    assert too_long.value.code == "context_length_exceeded"


def test_a_stream_may_be_left(client):
    stream = ask(client, stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert ask(client).choices[0].message.content
