"""Answers by a server: our own in this process, and stand-ins that fail or return no ids."""

import json
import threading
from contextlib import contextmanager
from email.message import Message
from http.client import BadStatusLine, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from itertools import chain, repeat
from unittest.mock import Mock
from urllib.error import HTTPError

import pytest
import torch

from blockdraft.core.errors import MISTAKE, NETWORK_FAILED, ConfigError, NetworkError
from blockdraft.data import endpoint_answers, generate
from blockdraft.data.answers import Job
from blockdraft.data.endpoint_answers import KEY_VARIABLE, Endpoint, EndpointWriter
from blockdraft.data.engine_answers import EngineWriter
from blockdraft.models.target.loading import load_target_model
from blockdraft.text.tokenizer import load_tokenizer
from tests.command_line import run
from tests.rows import write_prompts
from tests.serving import running_server
from tests.small_llm import load_llm


def jobs(num, **changes):
    settings = {"set": "s", "max_tokens": 6, "temperature": 0.0, **changes}
    return [Job(id=str(n), prompt_ids=(1 + n, 2, 3), **settings) for n in range(num)]


def good_answer(body):
    return 200, {"choices": [{"token_ids": [9, 8, body["prompt"][0]], "finish_reason": "stop"}]}


@contextmanager
def server_of(answer=good_answer, models=("tiny",), headers=None):
    """`answer` gives (status, body) for the body of a request; yields (URL, what was asked)."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def send(self, status, body):
            said = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(said)))
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said)

        def do_GET(self):
            self.send(200, {"data": [{"id": name} for name in models]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, body, self.headers.get("authorization")))
            self.send(*answer(body))

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def answers_of(url, some, slots=3, **changes):
    endpoint = Endpoint.find(url, changes.pop("model", None))
    writer = EndpointWriter(endpoint, slots=slots, capacity=64, seed=0)
    return {answer.job.id: answer for answer in writer.write(some)}


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch):
    monkeypatch.setattr(endpoint_answers, "FIRST_PAUSE", 0.001)


def test_our_own_server_answers_as_our_own_engine(folders):
    model = load_target_model(folders[0], torch.float32, "cpu")
    eos_ids = load_tokenizer(folders[0]).eos_ids
    some = jobs(9, max_tokens=20)
    engine = EngineWriter(model, stop_ids=eos_ids, slots=3, capacity=64, seed=0)
    expected = {answer.job.id: answer for answer in engine.write(some)}
    with running_server(load_llm(folders)) as running:
        found = answers_of(f"{running.url}/v1", some)
    assert found == expected


def test_data_by_an_endpoint_goes_on(folders, tmp_path, monkeypatch):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 7)

    def data(url):
        arguments = ["data", "--target", folders[0], "--output", tmp_path / "out"]
        arguments += ["--prompts", prompts, "--max-tokens", 8, "--endpoint", url]
        return run(*arguments)

    monkeypatch.setattr(endpoint_answers, "NUM_TRIES", 2)
    left = [3]

    def fails_later(body):
        left[0] -= 1
        return good_answer(body) if left[0] >= 0 else (503, {})

    with server_of(fails_later) as (url, _):
        result = data(url)
    assert result.exit_code == NETWORK_FAILED, result.output
    assert "give the same command again" in " ".join(result.stderr.split())
    lines = (tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert 1 <= len(lines) <= 3
    with running_server(load_llm(folders)) as running:
        result = data(f"{running.url}/v1")
    assert result.exit_code == 0, result.output
    rows = (tmp_path / "out" / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    assert rows[: len(lines)] == lines
    assert sorted(json.loads(row)["id"] for row in rows) == [f"prompts-{n}" for n in range(7)]


def test_requests_say_what_is_wanted_and_are_bounded(monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    now, most, lock = [0], [0], threading.Lock()
    together = threading.Barrier(3, timeout=30)

    def answer(body):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        together.wait()
        with lock:
            now[0] -= 1
        return good_answer(body)

    with server_of(answer) as (url, asked):
        found = answers_of(url + "/", [*jobs(8), *jobs(1, max_tokens=100), *jobs(1, sample=1)])
    assert len(found) == 8
    assert len(asked) == 9
    assert most == [3]
    path, body, key = asked[0]
    assert path == "/v1/completions"
    assert key == "Bearer secret"
    seeds = {body.pop("seed") for _, body, _ in asked}
    assert len(seeds) == 9
    assert body | {"prompt": [1, 2, 3]} == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 6,
        "temperature": 0.0,
        "return_token_ids": True,
        # Or a server would take those of the model's generation_config.json.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


@pytest.mark.parametrize("status", [400, 422])
def test_a_field_that_the_endpoint_does_not_know_is_left_out(status, caplog):
    """As OpenAI's own API, which names one of them at a time."""
    own = {"model", "prompt", "max_tokens", "temperature", "seed", "return_token_ids"}
    own |= {"top_p", "presence_penalty", "frequency_penalty"}

    def answer(body):
        unknown = sorted(body.keys() - own)
        message = f"Unrecognized request argument supplied: {unknown[0]}" if unknown else ""
        return (status, {"error": {"message": message}}) if unknown else good_answer(body)

    with server_of(answer) as (url, asked):
        assert len(answers_of(url, jobs(6), slots=3)) == 6
    for name in ("top_k", "min_p", "repetition_penalty"):
        assert caplog.text.count(f"refuses {name} (") == 1
    assert not [body for _, body, _ in asked[-3:] if body.keys() - own]
    assert all(body["top_p"] == 1.0 for _, body, _ in asked)


def test_a_refusal_of_something_else_leaves_no_field_out():
    def answer(body):
        return 400, {"error": {"message": "the model named min_prompt does not exist"}}

    with server_of(answer) as (url, asked), pytest.raises(ConfigError, match="min_prompt"):
        answers_of(url, jobs(1), slots=1)
    assert len(asked) == 1


def test_failures_that_may_pass_are_tried_again():
    statuses = iter([429, 503, 500])

    def answer(body):
        status = next(statuses, 200)
        return good_answer(body) if status == 200 else (status, {"error": {"message": "busy"}})

    with server_of(answer) as (url, asked):
        assert answers_of(url, jobs(2), slots=1).keys() == {"0", "1"}
    assert len(asked) == 5


def test_answers_that_break_off_are_tried_again(monkeypatch):
    whole = endpoint_answers._OPENER.open
    broken = Message(), BytesIO()
    broken[1].read = Mock(side_effect=IncompleteRead(b"bu", 2))
    errors = [IncompleteRead(b"{", 9), BadStatusLine(""), HTTPError("/", 503, "busy", *broken)]
    replies = chain(errors, repeat(None))

    def urlopen(request, timeout):
        if (error := next(replies)) is not None:
            raise error
        return whole(request, timeout=timeout)

    monkeypatch.setattr(endpoint_answers._OPENER, "open", urlopen)
    with server_of() as (url, _):
        assert answers_of(url, jobs(2), slots=1).keys() == {"0", "1"}


@pytest.mark.parametrize(
    ("told", "finish"),
    [("stop", "stop"), ("length", "length"), ("abort", "length"), (None, "length")],
)
def test_an_answer_without_its_end_counts_as_cut_off(told, finish):
    """It is asked for again, and no later turn goes on from it."""

    def answer(body):
        status, said = good_answer(body)
        said["choices"][0]["finish_reason"] = told
        return status, said

    with server_of(answer) as (url, _):
        assert answers_of(url, jobs(1), slots=1)["0"].finish == finish


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, {"choices": [{"text": "hi", "finish_reason": "stop"}]}), "returns no token ids"),
        ((200, {"choices": []}), "not answer in OpenAI's format"),
        ((200, ["hello"]), "not answer in OpenAI's format"),
        (
            (401, {"error": {"message": "no"}}),
            f"requires an API key .401 no.; put it into .{KEY_VARIABLE}",
        ),
        ((404, {"message": "no such model"}), "no such model.; give the URL"),
        ((400, {"error": {"message": "no such field"}}), r"no such field; .* room for \d+ tokens"),
    ],
)
def test_endpoints_that_cannot_answer_are_refused_at_once(reply, words):
    with server_of(lambda body: reply) as (url, asked), pytest.raises(ConfigError, match=words):
        answers_of(url, jobs(3), slots=1)
    assert len(asked) == 1


def test_one_request_that_is_refused_is_left_out(caplog):
    def answer(body):
        return (
            (400, {"error": {"message": "too long"}})
            if body["prompt"][0] == 3
            else (good_answer(body))
        )

    with server_of(answer) as (url, _):
        assert answers_of(url, jobs(5), slots=1).keys() == {"0", "1", "3", "4"}
    assert "no answer to 2: 400 too long" in caplog.text


def test_the_model_is_the_only_one_or_named():
    with server_of(models=("a", "b")) as (url, asked):
        with pytest.raises(
            ConfigError, match=r"serves 2 models \(a, b\).*-model \(of .*--against-model"
        ):
            Endpoint.find(url, None)
        answers_of(url, jobs(1), model="b")
    assert asked[0][1]["model"] == "b"


def test_nobody_there(monkeypatch, caplog):
    monkeypatch.setattr(endpoint_answers, "NUM_TRIES", 3)
    with server_of() as (url, _):
        pass
    with pytest.raises(NetworkError, match=r"failed 3 times, most recently with: .*refused"):
        Endpoint.find(url, None)
    # Else nothing would be said for a minute.
    assert caplog.text.count("does not answer") == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_does_not_get_the_key(status, monkeypatch):
    monkeypatch.setenv("BLOCKDRAFT_ENDPOINT_KEY", "secret")
    with (
        server_of() as (other, _),
        server_of(lambda _: (status, {}), headers={"location": f"{other}/models"}) as (url, asked),
        pytest.raises(
            ConfigError, match=rf"redirects .* \({status} {other}/models\), .* URL there"
        ),
    ):
        Endpoint.find(url, None).call("/completions", {})
    assert asked == [("/v1/completions", {}, "Bearer secret")]


def test_a_password_in_the_url_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="a user or a password") as refused:
        Endpoint.find("http://me:secret@localhost:8000/v1", "tiny")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["no-url", "http://", "ftp://a/v1", "http://a:port/v1", "http://a b/v1"]
)
def test_what_is_no_url_is_refused_before_a_model_is_looked_for(url, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "resolve_model", lambda _: pytest.fail("looked for the target"))
    arguments = ["--output", str(tmp_path / "out"), "--self-written", "1", "--endpoint", url]
    result = run("data", *arguments)
    assert result.exit_code == MISTAKE
    with pytest.raises(ConfigError, match="is not a URL"):
        Endpoint.find(url, None)
