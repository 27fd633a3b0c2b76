"""The security checks in front of the application: which requests pass, and the errors that the others get."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from pace.server.errors import ApiError
from pace.server.network.security import Gate
from pace.server.options import ServeOptions

LOCAL = ("host", "localhost:8000")
PAGE = ("origin", "https://chat.example")


class Asked:
    """Result of a request: its status, headers and JSON, and what the application received (None: nothing)."""

    def __init__(self, gate: Gate, method: str, path: str, *headers: tuple[str, str]) -> None:
        self.seen = None
        self.status, self.headers, body = 0, [], b""

        async def send(message) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                assert not self.status
                self.status, self.headers = message["status"], message["headers"]
            body += message.get("body", b"")

        async def app(scope, receive, send) -> None:
            self.seen = scope["pace"]
            if path == "/crash":
                raise KeyError("/a/secret/path")
            if path == "/refuse":
                raise ApiError(429, "wait", headers={"Retry-After": "7"})
            await send({"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"of the app")]})
            await send({"type": "http.response.body", "body": b"{}"})

        gate.app = app
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        scope = {"type": "http", "method": method, "path": path, "headers": raw}
        asyncio.run(gate(scope, None, send))
        self.json = json.loads(body or b"{}")

    def header(self, name: str) -> str | None:
        found = [value.decode() for other, value in self.headers if other.decode().lower() == name]
        assert len(found) <= 1
        return found[0] if found else None


def gate(**more) -> Gate:
    return Gate(None, ServeOptions(**{"model": "tiny", **more}))


KEYED = {"keys": ("first-key", "second-key"), "host": "0.0.0.0"}

# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [[("authorization", "Bearer first-key")], [("authorization", "bearer  second-key ")], [("x-api-key", "second-key")],
     [("authorization", "Bearer other"), ("x-api-key", "first-key")]],
    ids=str,
)  # fmt: skip
def test_a_key_opens(headers):
    asked = Asked(gate(**KEYED), "POST", "/v1/chat/completions", *headers)
    assert asked.status == 200 and asked.seen["key"] and len(asked.seen["salt"]) == 64


@pytest.mark.parametrize(
    "headers",
    [[], [("authorization", "Bearer wrong")], [("authorization", "Bearer first-ke")],
     [("authorization", "Bearer first-keyy")], [("authorization", "Bearer FIRST-KEY")],
     [("authorization", "Bearer first-key,second-key")], [("authorization", "Bearer")],
     [("authorization", "first-key")], [("authorization", "Basic first-key")],
     [("authorization", "Bearer " + "a" * 20_000)], [("authorization", "Bearer \xff\xfe")], [("x-api-key", "")],
     [("cookie", "first-key")]],
    ids=lambda headers: str(headers)[:50],
)  # fmt: skip
def test_without_a_key_nothing_opens(headers):
    asked = Asked(gate(**KEYED), "POST", "/v1/chat/completions", *headers)
    assert asked.status == 401 and asked.seen is None
    assert asked.json["error"]["type"] == "authentication_error" and asked.json["error"]["code"] == "invalid_api_key"
    assert asked.header("www-authenticate") == "Bearer" and asked.header("x-request-id")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/tokenize", "/metrics", "/limits", "/docs", "/openapi.json", "/redoc", "/index.html", "/ui"),
        *("//", "//v1/models", "/v1//models", "/V1/models", "/v1/../v1/models", "/../health", "/health/../v1/models"),
        *("/./health", "/health/", "//health", "/health//", "/Health", "/health\x00", "/health%", "/ready/x", "*", ""),
    ],
)
def test_no_path_goes_around_the_key(path):
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE"):
        assert Asked(gate(**KEYED), method, path).status == 401


@pytest.mark.parametrize("path", ["/", "/live", "/health", "/ready"])
def test_probes_and_the_page_need_no_key(path):
    for method in ("GET", "HEAD"):
        asked = Asked(gate(**KEYED), method, path)
        assert asked.status == 200 and asked.seen["key"] is None
    for method in ("POST", "DELETE"):
        assert Asked(gate(**KEYED), method, path).status == 401


@pytest.mark.parametrize("path", ["//v1/models", "/v1/../models", "/v1/./models", "/v1/a\\b", "/v1/a\x00b", "/v1/\nb"])
def test_paths_that_mean_others_are_nobodys(path):
    asked = Asked(gate(), "GET", path, LOCAL)
    assert asked.status == 404 and asked.seen is None


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/messages/count_tokens"])
def test_errors_have_the_form_of_their_path(path):
    asked = Asked(gate(**KEYED), "POST", path)
    assert asked.status == 401 and asked.json["type"] == "error"
    assert asked.json["error"]["type"] == "authentication_error"


def test_each_key_has_its_own_salt_which_lasts():
    def seen(key, **more):
        return Asked(gate(**KEYED | more), "POST", "/v1/models", ("x-api-key", key)).seen

    first, second = seen("first-key"), seen("second-key")
    assert first["salt"] != second["salt"] and first["key"] != second["key"]
    again = seen("first-key", keys=("zero", "first-key"))
    assert (again["salt"], again["key"]) == (first["salt"], first["key"])
    assert not any("key" in part or first["key"] in first["salt"] for part in (first["salt"], first["key"]))
    assert Asked(gate(), "POST", "/v1/models", LOCAL).seen["salt"] is None


def test_keys_are_never_logged(caplog):
    caplog.set_level(logging.DEBUG)
    for headers in ([("x-api-key", "first-key")], [("x-api-key", "wrong-key")]):
        for path in ("/v1/models", "/crash"):
            Asked(gate(**KEYED), "POST", path, *headers)
    assert "first-key" not in caplog.text and "wrong-key" not in caplog.text


# -- Host --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost.:1"])
def test_this_machine_may_be_named(host):
    assert Asked(gate(), "GET", "/v1/models", ("host", host)).status == 200


@pytest.mark.parametrize(
    "hosts",
    [["evil.example"], ["localhost.evil.example:8000"], ["evil.example#localhost"], ["localhost@evil.example"], [""]]
    + [[], ["localhost", "evil.example"], ["[::1"], ["::1"], ["127.0.0.1.evil.example"], ["localhost:80:80"]],
    ids=str,
)
def test_another_name_is_refused_where_no_key_is_needed(hosts):
    """DNS rebinding: a page of evil.example, whose name now resolves to this machine."""
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/health"), ("GET", "/"), ("OPTIONS", "/")):
        asked = Asked(gate(), method, path, *(("host", host) for host in hosts))
        assert asked.status == 403 and asked.seen is None and asked.json["error"]["type"] == "permission_error"
    message = asked.json["error"]["message"]
    assert "may add it to the allowed hosts" in message and "pace serve" not in message  # the server may also be Ray's


def test_further_names_may_be_allowed():
    assert Asked(gate(allowed_hosts=("A.example",)), "GET", "/health", ("host", "a.example:1")).status == 200
    assert Asked(gate(**KEYED), "GET", "/health", ("host", "any.example")).status == 200
    asked = Asked(gate(**KEYED, allowed_hosts=("a.example",)), "GET", "/health", ("host", "any.example"))
    assert asked.status == 403


# -- origins -----------------------------------------------------------------------------------------------------------

PREFLIGHT = (LOCAL, PAGE, ("access-control-request-method", "POST"))


def test_pages_of_other_origins_may_do_nothing():
    asked = Asked(gate(), "OPTIONS", "/v1/chat/completions", *PREFLIGHT)
    assert asked.status == 403 and asked.header("access-control-allow-origin") is None and asked.seen is None
    asked = Asked(gate(), "GET", "/v1/models", LOCAL, PAGE)
    assert asked.header("access-control-allow-origin") is None


@pytest.mark.parametrize("more", [{}, KEYED], ids=["open", "keyed"])
def test_pages_of_listed_origins_may(more):
    listed = gate(**more, cors_origins=("https://other.example", "https://chat.example"))
    wanted = ("access-control-request-headers", "authorization, content-type, x-stainless-lang")
    asked = Asked(listed, "OPTIONS", "/v1/chat/completions", *PREFLIGHT, wanted)
    assert asked.status == 200 and asked.seen is None
    assert asked.header("access-control-allow-origin") == "https://chat.example" and asked.header("vary") == "Origin"
    assert asked.header("access-control-allow-headers") == wanted[1]
    assert "POST" in asked.header("access-control-allow-methods")

    asked = Asked(listed, "GET", "/v1/models", LOCAL, PAGE, ("x-api-key", "first-key"))
    assert asked.status == 200 and asked.header("access-control-allow-origin") == "https://chat.example"
    for origin in ("https://evil.example", "https://chat.example.evil", "http://chat.example", "null", ""):
        asked = Asked(listed, "GET", "/health", LOCAL, ("origin", origin))
        assert asked.header("access-control-allow-origin") is None and asked.header("vary") == "Origin"
        assert Asked(listed, "OPTIONS", "/", LOCAL, ("origin", origin), PREFLIGHT[2]).status == 403


def test_a_page_may_read_why_it_is_refused():
    asked = Asked(gate(**KEYED, cors_origins=("https://chat.example",)), "GET", "/v1/models", PAGE)
    assert asked.status == 401 and asked.header("access-control-allow-origin") == "https://chat.example"


def test_all_origins_never_come_with_credentials():
    every = gate(**KEYED, cors_origins=("*",))
    for asked in (Asked(every, "OPTIONS", "/v1/models", *PREFLIGHT), Asked(every, "GET", "/health", PAGE)):
        assert asked.status == 200 and asked.header("access-control-allow-origin") == "*"
        assert asked.header("access-control-allow-credentials") is None


def test_headers_of_a_preflight_are_not_repeated_blindly():
    listed = gate(cors_origins=("https://chat.example",))
    for wanted in ("a\r\nset-cookie: b", "a" * 5000, "<script>"):
        asked = Asked(listed, "OPTIONS", "/", *PREFLIGHT, ("access-control-request-headers", wanted))
        assert asked.header("access-control-allow-headers") is None


# -- ids and failures --------------------------------------------------------------------------------------------------


def test_a_request_id_is_echoed():
    for name in ("a", "A.b_c-9" * 10, "x" * 128):
        asked = Asked(gate(), "GET", "/health", LOCAL, ("x-request-id", name))
        assert asked.header("x-request-id") == asked.seen["request_id"] == name
    assert Asked(gate(), "GET", "/health", LOCAL).header("request-id") is None


def test_a_request_id_has_anthropics_name_on_its_paths():
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        asked = Asked(gate(), "POST", path, LOCAL)
        assert asked.header("request-id") == asked.header("x-request-id") == asked.seen["request_id"]


def test_a_request_id_that_could_forge_a_line_is_not_echoed():
    found = set()
    for names in ([], [""], ["x" * 129], ["a\r\nb: c"], ["a b"], ["é"], ["a", "b"], ["a\n"], ["x" * 1_000_000]):
        asked = Asked(gate(), "GET", "/health", LOCAL, *(("x-request-id", name) for name in names))
        assert asked.header("x-request-id") == asked.seen["request_id"] not in names
        found.add(asked.seen["request_id"])
    assert len(found) == 9 and all(len(name) < 40 for name in found)


def test_an_application_that_fails_is_answered_for(caplog):
    asked = Asked(gate(), "GET", "/crash", LOCAL, ("x-request-id", "r-1"))
    assert asked.status == 500 and asked.json["error"]["type"] == "server_error"
    assert "secret" not in str(asked.json) and "r-1" in asked.json["error"]["message"]
    assert asked.header("x-should-retry") == "false" and asked.header("x-request-id") == "r-1"
    assert "r-1" in caplog.text and "KeyError" in caplog.text


def test_an_error_of_the_application_keeps_its_headers():
    asked = Asked(gate(), "GET", "/refuse", LOCAL)
    assert (asked.status, asked.header("retry-after")) == (429, "7")


def test_web_sockets_do_not_pass():
    with pytest.raises(ValueError, match="websocket"):
        asyncio.run(gate()({"type": "websocket", "path": "/", "headers": []}, None, None))
