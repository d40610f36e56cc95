"""Predicted outputs: the same answer, counts of what was as predicted, and refusals."""

import pytest

from blockdraft import SamplingParams
from blockdraft.core.errors import RequestError
from tests.serving import chat_body, error_of
from tests.sources import num_accepted_by

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def details(answer):
    found = answer["usage"]["completion_tokens_details"]
    return found["accepted_prediction_tokens"], found["rejected_prediction_tokens"]


def content(answer):
    return [choice["message"]["content"] for choice in answer["choices"]]


def num_predicted(server):
    """Accepted tokens of all predictions so far."""
    lines = server.client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("blockdraft:accepted_tokens_total{")]
    return sum(float(line.split()[-1]) for line in found if "prediction" in line)


def num_tokens(llm, text):
    return len(llm.tokenizer.encode_continuation(text))


@pytest.mark.parametrize("params", [{}, {"n": 2}, {"temperature": 1.0, "seed": 2, "n": 3}])
def test_a_prediction_changes_no_answer_and_is_counted(server, llm, params):
    plain = server.chat(**params).json()
    (text, *_) = content(plain)
    for given in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        prediction = {"type": "content", "content": given}
        answer = server.chat(**params, prediction=prediction).json()
        assert content(answer) == content(plain)
        accepted, rejected = details(answer)
        # Another sample may say something else, and what is no text has other tokens.
        assert accepted + rejected == params.get("n", 1) * num_tokens(llm, text)
        assert accepted > 0
    wrong = server.chat(**params, prediction={"type": "content", "content": "zzzz qqqq"}).json()
    assert content(wrong) == content(plain)
    accepted, rejected = details(wrong)
    assert (accepted, rejected > 0) == (0, True)


def test_a_stream_counts_the_same(server):
    (text,) = content(server.chat().json())
    asked = {"prediction": {"type": "content", "content": text}}
    whole = server.chat(**asked).json()
    events = server.events(
        CHAT,
        messages=[{"role": "user", "content": "the abc"}],
        stream=True,
        max_tokens=24,
        temperature=0,
        ignore_eos=True,
        stream_options={"include_usage": True},
        **asked,
    )
    assert sum(details(events[-1])) == sum(details(whole)) > 0


def test_text_completions_take_one_too(server):
    body = {"prompt": ["the abc", "abc"], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    plain = server.post(TEXT, **body).json()
    text = plain["choices"][0]["text"]
    found = server.post(TEXT, **body, prediction={"type": "content", "content": text}).json()
    assert [c["text"] for c in found["choices"]] == [c["text"] for c in plain["choices"]]
    assert details(found)[0] > 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_the_other_chats_take_one_too(server, path):
    if path == "/v1/responses":
        body = {"input": "the abc", "max_output_tokens": 24}
    else:
        body = {"messages": chat_body()["messages"], "max_tokens": 24}
    body = {**body, "temperature": 0, "ignore_eos": True}
    (text,) = content(server.chat().json())
    for prediction in (text, "zzzz qqqq"):
        before = num_predicted(server)
        asked = {**body, "prediction": {"type": "content", "content": prediction}}
        response = server.post(path, **asked)
        assert "warning" not in response.headers
        answer = response.json()
        said = answer["output"][0] if path == "/v1/responses" else answer
        assert said["content"][0]["text"] == text
        assert (num_predicted(server) > before) == (prediction == text)
    refused = server.post(path, **body, prediction={"type": "image", "content": "a"})
    assert refused.status_code == 400
    assert "type 'image'; give content" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("prediction", "part"),
    [
        ({"type": "image", "content": "a"}, "type 'image'; give content"),
        ({"type": "content"}, "content"),
        ({"type": "content", "content": 5}, "content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "text only"),
        ("a text", "prediction"),
        ({"type": "content", "content": "abc " * 3000}, "give the part that is expected first"),
    ],
)
def test_what_is_no_prediction_is_refused(server, prediction, part):
    response = server.chat(prediction=prediction)
    error = error_of(response, 400)
    assert part in error["message"]
    assert error["param"].startswith("prediction")


@pytest.mark.parametrize("prediction", [None, {"type": "content", "content": ""}])
def test_an_empty_prediction_is_none(server, prediction):
    assert content(server.chat(prediction=prediction).json()) == content(server.chat().json())


def test_predictions_in_python(llm):
    other = load_llm_like(llm)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (plain,) = other.generate("the abc", params).completions
    assert plain.num_predicted_tokens is None
    for prediction in (plain.token_ids, list(plain.token_ids)):
        given = SamplingParams(max_tokens=40, ignore_eos=True, prediction=prediction)
        (found,) = other.generate("the abc", given).completions
        assert found.token_ids == plain.token_ids
        assert (found.num_predicted_tokens, found.num_unpredicted_tokens) == (40, 0)
        assert found.acceptance.acceptance_length > 8
        assert num_accepted_by(found.acceptance, "prediction") > 30
    text = SamplingParams(max_tokens=40, ignore_eos=True, prediction=plain.text)
    assert other.generate("the abc", text).completions[0].token_ids == plain.token_ids
    for wrong, part in (((10**6,), "outside the vocabulary"), (range(10**5), "has 100000 tokens")):
        with pytest.raises(RequestError, match=part):
            other.generate("the abc", SamplingParams(prediction=wrong))


def load_llm_like(llm):
    """Another LLM of the same pair: the first one serves."""
    from blockdraft import LLM

    config = llm.config
    return LLM(config.target, config.drafter, dtype=config.dtype, adaptive=False)


@pytest.mark.parametrize("prediction", [5, None, {"a": 1}, b"abc", ["a"], [-1], [True]])
def test_parameters_refuse_what_is_no_prediction(prediction):
    with pytest.raises(RequestError, match="prediction"):
        SamplingParams(prediction=prediction)
