"""Who may ask a server that listens to this machine only: no page that a browser has open."""

import socket

import pytest

from blockdraft import ConfigError
from blockdraft.server.address import Names, is_loopback, url_of
from blockdraft.server.config import ServeConfig
from tests.serving import chat_body, error_of, running_server

CHAT = "/v1/chat/completions"
GETS = ["/", "/page/page.js", "/metrics", "/v1/models", "/openapi.json", "/health", "/version"]
PAGE = "http://page.example"


def post(server, **headers):
    return server.client.post(CHAT, json=chat_body(max_tokens=2), headers=headers)


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize("host", ["page.example", "page.example:8000", "localhost.page.example"])
def test_a_page_whose_name_was_pointed_at_us_reads_nothing(server, path, host):
    error = error_of(server.client.get(path, headers={"host": host}), 421)
    assert error["code"] == "unknown_host"
    assert repr(host) in error["message"]
    assert "--allowed-host" in error["message"]
    assert error_of(post(server, host=host), 421)["code"] == "unknown_host"


@pytest.mark.parametrize(
    "origin", [PAGE, "null", "http://localhost:1", "http://127.0.0.1.page.example"]
)
def test_a_page_of_another_origin_makes_us_do_nothing(server, llm, monkeypatch, origin):
    monkeypatch.setattr(server.service, "chat", None)  # would fail
    error = error_of(post(server, origin=origin), 403)
    assert error["code"] == "foreign_origin"
    assert "--cors-origin" in error["message"]
    for path in GETS:
        assert server.client.get(path, headers={"origin": origin}).status_code == 403


def test_a_foreign_origin_is_seen_behind_another_one(server):
    headers = [("origin", server.url), ("origin", PAGE)]
    for one in (headers, headers[::-1]):
        answer = server.client.post(CHAT, json=chat_body(max_tokens=2), headers=one)
        assert error_of(answer, 403)["code"] == "foreign_origin"


def test_a_foreign_name_is_refused_before_its_body_is_read(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as sock:
        sock.sendall(
            f"POST {CHAT} HTTP/1.1\r\nhost: page.example\r\ncontent-length: 99\r\n\r\n".encode()
        )
        sock.settimeout(5)
        assert sock.recv(100).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.8.9.1:80", "[::1]:8000", "[::1]"]
)
def test_every_name_of_this_machine_is_answered(server, host):
    assert post(server, host=host).status_code == 200
    assert post(server, host=host, origin=f"http://{host}").status_code == 200


@pytest.mark.parametrize(
    "host", ["[::1", "::1", "localhost:x", "a@localhost", "[::1]x", "localhost/"]
)
def test_a_host_that_is_none_is_refused(host):
    assert not Names(ServeConfig()).allow_host(host)


def test_names_and_origins_can_be_allowed(llm):
    with running_server(llm, allowed_hosts=("Models.example",), cors_origins=(PAGE,)) as server:
        assert post(server, host="models.example:443").status_code == 200
        # A proxy on this machine may name us by our address; the page is ours all the same.
        assert post(server, origin="https://models.example").status_code == 200
        assert post(server, origin=PAGE).status_code == 200
        assert post(server, origin="http://other.example").status_code == 403
        assert post(server, host="other.example").status_code == 421
    with running_server(llm, cors_origins=("*",)) as server:
        assert post(server, origin="http://other.example").status_code == 200


@pytest.mark.parametrize(
    ("options", "are_checked"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "a" * 64}, False),  # which no name may be, and bind refuses
        ({"host": "0.0.0.0", "allowed_hosts": ("models.example",)}, True),
    ],
)
def test_names_are_checked_where_they_are_known(options, are_checked):
    assert Names(ServeConfig(**options)).are_checked == are_checked


@pytest.mark.parametrize(
    ("host", "url"),
    [("localhost", "http://localhost:80"), ("::", "http://[::]:80"), ("::1", "http://[::1]:80")],
)
def test_the_url_of_an_address_is_one(host, url):
    assert url_of(host, 80) == url


@pytest.mark.parametrize(
    ("name", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("10.0.0.1", False), ("a", False)],
)
def test_names_of_this_machine_are_known(name, expected):
    assert is_loopback(name) == expected


def clients_of(server, monkeypatch):
    found, real = [], server.service.chat

    def chat(body, caller):
        found.append(caller.client)
        return real(body, caller)

    monkeypatch.setattr(server.service, "chat", chat)
    return found


@pytest.mark.parametrize(
    ("trusted", "expected"),
    [((), "127.0.0.1"), (("10.0.0.0/8",), "127.0.0.1"), (("127.0.0.1",), "9.9.9.9")],
)
def test_only_a_known_proxy_says_for_whom_it_asks(llm, monkeypatch, trusted, expected):
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    with running_server(llm, trusted_proxies=trusted) as server:
        found = clients_of(server, monkeypatch)
        headers = {"x-forwarded-for": "9.9.9.9", "x-forwarded-host": "localhost"}
        assert post(server, **headers).status_code == 200
        assert post(server, **headers, host="page.example").status_code == 421
        assert found == [expected]


@pytest.mark.parametrize("told", ["9.9.9.9 POST /v1/models 200", "x" * 3000, "\x9b2J"])
def test_what_is_no_address_is_nobodys(llm, monkeypatch, caplog, told):
    with running_server(llm, trusted_proxies=("127.0.0.1",)) as server, caplog.at_level("INFO"):
        found = clients_of(server, monkeypatch)
        assert post(server, **{"x-forwarded-for": told.encode("latin-1")}).status_code == 200
        assert found == ["unknown"]
    assert told not in caplog.text


@pytest.mark.parametrize(("trusted", "expected"), [((), "127.0.0.1"), (("127.0.0.1",), "9.9.9.9")])
def test_addresses_of_ipv4_are_plain_where_ipv6_is_listened_to(llm, monkeypatch, trusted, expected):
    """The system writes them as ::ffff:127.0.0.1 there."""
    try:
        socket.create_server(("::", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with running_server(llm, host="::", trusted_proxies=trusted) as server:
        found = clients_of(server, monkeypatch)
        assert post(server, **{"x-forwarded-for": "9.9.9.9"}).status_code == 200
        assert found == [expected]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_hosts": ("",)},
        {"allowed_hosts": ("http://a.example",)},
        {"allowed_hosts": ("a.example:80",)},
        {"allowed_hosts": ("*",)},
        {"trusted_proxies": ("proxy.example",)},
        {"trusted_proxies": ("10.0.0.1/8",)},
        {"trusted_proxies": ("::ffff:10.0.0.1",)},
        {"trusted_proxies": ("::ffff:10.0.0.0/104",)},
        {"prepare_seconds": 0.0},
    ],
)
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        ServeConfig(**options)
