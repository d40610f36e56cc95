"""The web page's files as they are served, and the rounds that it shows."""

import re
import tomllib
from pathlib import Path

import pytest

from blockdraft.measure.step_report import Pace
from blockdraft.server import web
from blockdraft.text.kinds import KINDS
from tests.serving import chat_body, error_of, running_server

CHAT = "/v1/chat/completions"
ROUNDS = {"include_usage": True, "include_rounds": True}
ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "src" / "blockdraft" / "server" / "page"
NAMES = sorted(path.name for path in FOLDER.iterdir())


def rounds_of(events, index=0):
    """Content, rounds and kinds of one choice of a chat stream."""
    content, rounds, kinds = "", [], None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                assert kinds is None, "nothing comes after the last piece"
                content += choice["delta"].get("content", "")
                rounds += choice.get("rounds", [])
                kinds = choice.get("token_kinds")
    return content, rounds, kinds


def test_the_page_comes_with_a_strict_policy(server):
    page = server.client.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    policy = page.headers["content-security-policy"]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert "unsafe" not in policy
    assert page.content == (FOLDER / "index.html").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_served_as_what_it_is(server, name):
    types = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
    answer = server.client.get(f"/page/{name}")
    assert answer.status_code == 200
    assert answer.content == (FOLDER / name).read_bytes()
    expected = types.get(Path(name).suffix, "image/svg+xml")
    assert answer.headers["content-type"].split(";")[0] == expected
    assert "content-security-policy" in answer.headers


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fweb.py", "%2e%2e", "web.py"])
def test_nothing_else_is_served(server, name):
    error = error_of(server.client.get(f"/page/{name}"), 404)
    assert "page" in error["message"]


def test_the_page_needs_no_key_and_what_it_asks_for_does(llm):
    with running_server(llm, api_keys=("secret",)) as server:
        for path in ["/", *sorted(web.PATHS)]:
            assert server.client.get(path).status_code == 200
        error_of(server.client.get("/v1/models"), 401)
        error_of(server.client.get("/page/nothing.js"), 401)


def test_the_page_loads_its_own_files_only():
    found = set()
    for name in NAMES:
        text = (FOLDER / name).read_text()
        for address in re.findall(r"https?://[^\s\"']+", text):
            assert address == "http://www.w3.org/2000/svg"  # a name, which nobody fetches
        found |= set(re.findall(r'(?:href|src)="page/([^"]+)"', text))
        found |= set(re.findall(r'from "\./([^"]+)"', text))
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert found | {"index.html"} == set(NAMES)


def test_the_wheel_holds_every_file():
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    package = ROOT / "src" / "blockdraft"
    packed = {path for glob in tables["package-data"]["blockdraft"] for path in package.glob(glob)}
    assert {FOLDER / name for name in NAMES} <= packed


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 1.3, "seed": 5, "max_tokens": 60},
        {"temperature": 1.0, "seed": 9, "stop": ["e", "zz"]},
        {"temperature": 1.0, "seed": 2, "stop": ["ab", "!"], "max_tokens": 40},
        {"num_draft_tokens": 2, "temperature": 0.9, "seed": 3},
        {"max_tokens": 1},
    ],
)
def test_rounds_join_to_the_content_and_agree_with_the_usage(server, fields):
    events = server.events(CHAT, **chat_body(**fields), stream_options=ROUNDS)
    content, rounds, kinds = rounds_of(events)
    assert content == server.chat(**fields).json()["choices"][0]["message"]["content"]
    texts = [text for one in rounds for text in one["tokens"]]
    assert "".join(texts) == content
    usage = events[-1]["usage"]
    details = usage["completion_tokens_details"]
    num_accepted = details["accepted_prediction_tokens"]
    assert len(texts) == len(kinds) == usage["completion_tokens"]
    assert sum(one["num_accepted"] for one in rounds) == num_accepted
    num_drafted = num_accepted + details["rejected_prediction_tokens"]
    assert sum(one["num_drafted"] for one in rounds) == num_drafted
    assert set(kinds) <= set(KINDS)
    assert (len(rounds[0]["tokens"]), rounds[0]["num_drafted"]) == (1, 0)
    for one in rounds:
        assert one["num_accepted"] <= one["num_drafted"]
        assert len(one["tokens"]) <= one["num_accepted"] + 1


@pytest.mark.parametrize("limit", ["_MOST_KINDS", "_MOST_CHARACTERS"])
def test_a_long_answer_has_no_kinds(server, monkeypatch, limit):
    monkeypatch.setattr(f"blockdraft.server.pieces.{limit}", 3)
    events = server.events(CHAT, **chat_body(stream_options=ROUNDS))
    content, rounds, kinds = rounds_of(events)
    assert len(rounds) > 1
    assert len(content) > 3
    assert kinds is None


def test_every_sample_has_its_rounds(server):
    body = chat_body(n=3, temperature=1.0, seed=1)
    events = server.events(CHAT, **body, stream_options=ROUNDS)
    contents = []
    for index in range(3):
        content, rounds, kinds = rounds_of(events, index)
        assert "".join(text for one in rounds for text in one["tokens"]) == content
        assert len(kinds) == 24
        contents.append(content)
    assert len(set(contents)) > 1


def test_plain_decoding_has_rounds_of_one_token(server):
    events = server.events(CHAT, **chat_body(num_draft_tokens=0), stream_options=ROUNDS)
    _, rounds, _ = rounds_of(events)
    assert len(rounds) == 24
    assert all(len(one["tokens"]) == 1 and not one["num_drafted"] for one in rounds)


def test_rounds_come_while_the_text_does(server):
    body = chat_body(max_tokens=40, num_draft_tokens=1)
    events = server.events(CHAT, **body, stream_options=ROUNDS)
    assert sum("rounds" in choice for event in events for choice in event["choices"]) > 10


def test_a_stall_is_marked_on_its_round(server, monkeypatch):
    monkeypatch.setattr(Pace, "note", lambda self, now: (1.0, True))
    _, rounds, _ = rounds_of(server.events(CHAT, **chat_body(), stream_options=ROUNDS))
    assert [one["follows_stall"] for one in rounds] == [False] + [True] * (len(rounds) - 1)


def test_standard_clients_see_nothing_new(server):
    for options in ({}, {"stream_options": {"include_usage": True}}):
        for event in server.events(CHAT, **chat_body(), **options):
            for choice in event["choices"]:
                assert set(choice) == {"index", "delta", "logprobs", "finish_reason"}
                assert set(choice["delta"]) <= {"role", "content"}


def test_rounds_are_refused_for_texts_and_come_with_streams_only(server):
    options = {"include_rounds": True}
    text = server.complete(stream=True, stream_options=options)
    assert error_of(text, 400)["param"] == "stream_options"
    whole = server.chat(stream_options=options)
    assert "rounds" not in whole.json()["choices"][0]
    odd = server.chat(stream=True, stream_options={"include_rounds": "yes"})
    assert "include_rounds" in error_of(odd, 400)["param"]
