"""`--access-log`: one line for each request, even if it fails, without prompts or answers."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from pace.server.network.security import Gate
from tests.server.network.connections import ExampleApp, read_all, serve_options
from tests.server.network.connections import serving as raw_serving
from tests.server.serving import ANSWER, LONG, QUESTION, Serving, request_bytes
from tests.waiting import wait_until

FIELDS = ["time", "request_id", "key", "method", "path", "status", "model", "prompt_tokens", "completion_tokens"]
FIELDS += ["first_token_s", "total_s"]
SECRET = "Xylophone-4711"


@pytest.fixture(scope="module")
def logged():
    with Serving(access_log=True, body_bytes=100_000) as serving:
        yield serving


@pytest.fixture
def lines(capsys) -> Callable[[], list[dict[str, str]]]:
    """Returns the lines logged since the last call, after waiting for at least one."""

    def read() -> list[dict[str, str]]:
        text = ""

        def is_logged() -> bool:
            nonlocal text
            text += capsys.readouterr().err
            return text.endswith("\n")

        wait_until(is_logged)
        assert SECRET not in text and "capital" not in text.lower() and "Paris" not in text
        found = [re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line) for line in text.splitlines()]
        assert all([name for name, _ in pairs] == FIELDS for pairs in found), text
        return [dict(pairs) for pairs in found]

    return read


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer(logged, lines, stream):
    reply = logged.chat(stream=stream, stream_options={"include_usage": True} if stream else None, model="alias")
    (line,) = lines()
    usage = reply.events[-2]["usage"] if stream else reply.json["usage"]
    assert ANSWER.encode() in reply.body or stream
    assert line["request_id"] == reply.headers["x-request-id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", "200")
    assert (line["model"], line["key"]) == ("alias", "-")
    assert int(line["prompt_tokens"]) == usage["prompt_tokens"]
    assert int(line["completion_tokens"]) == usage["completion_tokens"]
    assert 0 < float(line["first_token_s"]) <= float(line["total_s"]) < 60


def test_other_forms_and_several_prompts(logged, lines):
    body = {"model": "tiny", "temperature": 0, "max_tokens": 3}
    asked = {
        "/v1/completions": {**body, "prompt": ["1, 2, 3,", "4, 5"], "n": 2, "temperature": 1, "seed": 1},
        "/v1/messages": {**body, "messages": QUESTION},
        "/v1/responses": {"model": "tiny", "input": "Hi", "max_output_tokens": 3},
    }
    for path, fields in asked.items():
        reply = logged.ask(path, fields, X_Request_Id="mine-" + path[4:])
        (line,) = lines()
        usage = reply.json["usage"]
        assert (line["request_id"], line["path"], line["model"]) == ("mine-" + path[4:], path, "tiny")
        counts = (int(line["prompt_tokens"]), int(line["completion_tokens"]))
        assert counts[0] == usage.get(
            "prompt_tokens", usage.get("input_tokens", 0) + usage.get("cache_read_input_tokens", 0)
        )
        assert counts[1] == usage.get("completion_tokens", usage.get("output_tokens"))
    logged.ask("/v1/models?key=" + SECRET)
    (line,) = lines()
    assert (line["method"], line["path"], line["status"]) == ("GET", "/v1/models", "200")
    assert [line[name] for name in FIELDS[6:10]] == ["-"] * 4


def test_refused_requests(logged, lines):
    secret = [{"role": "user", "content": SECRET}]
    chat = "/v1/chat/completions"
    for path, body, headers, status, model in (
        (chat, {"messages": secret, "temperature": -1, "model": "alias"}, {}, 400, "alias"),
        (chat, {"messages": secret, "model": "no such\nmodel=x"}, {}, 404, r'"no such\nmodel=x"'),
        (chat, {"messages": [{"role": "user", "content": SECRET * 9000}]}, {}, 413, "-"),
        (chat, {"messages": secret}, {"Host": "evil.example"}, 403, "-"),
        (chat, ("{" + SECRET).encode(), {}, 400, "-"),
        ("/nowhere", {"messages": secret}, {}, 404, "-"),
        (chat, None, {"X_Long": SECRET * 5000}, 431, "-"),
        ("/a b", None, {}, 400, "-"),
    ):  # fmt: skip
        reply = logged.ask(path, body, **headers)
        assert reply.status == status
        (line,) = lines()
        assert (line["status"], line["model"]) == (str(status), model)
        assert line["request_id"] == reply.headers["x-request-id"]
        assert (line["completion_tokens"], line["first_token_s"]) == ("-", "-")


def test_a_path_forges_no_line(logged, lines):
    logged.ask("/v1/%0Atime=1%20request_id=x%22%E2%80%A8")
    (line,) = lines()
    assert line["path"] == r'"/v1/\ntime=1 request_id=x\"\u2028"' and line["status"] == "404"


def test_a_body_that_is_given_up_is_one_line_with_one_id(lines):
    app = ExampleApp()
    gate = Gate(app, serve_options(access_log=True))
    with raw_serving(gate, access_log=True, body_bytes=1000) as running:
        chunked = b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        for begin, end, status in (
            (chunked, b"7d0\r\n" + b"a" * 2000, 413),
            (b"", chunked + b"7d0\r\n" + b"a" * 2000, 413),
            (chunked, b"", 408),
            (b"", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        ):
            with running.connect() as client:
                num_calls = len(app.calls)
                client.sendall(begin)
                wait_until(lambda: not begin or len(app.calls) > num_calls)
                client.sendall(end)
                running.pass_time(running.options.limits.body_seconds if status == 408 else 0.0)
                answer = read_all(client)
            assert answer.startswith(b"HTTP/1.1 %d" % status)
            time.sleep(0.1)
            (line,) = lines()
            own_id = re.search(rb"x-request-id: (\S+)", answer)[1].decode()
            assert (line["status"], line["request_id"]) == (str(status), own_id)


def test_a_client_that_leaves(logged, lines):
    for stream, status in ((True, "200"), (False, "499")):
        body = {"messages": LONG, "stream": stream, "max_tokens": 500, "ignore_eos": True, "model": "tiny"}
        with logged.connect() as connection:
            connection.sendall(request_bytes("/v1/chat/completions", body))
            if stream:
                assert connection.recv(100)
            else:
                wait_until(lambda: logged.service.admission.num_requests)
        (line,) = lines()
        assert (line["status"], line["model"]) == (status, "tiny")


def test_keys_are_named_and_not_shown(lines):
    with Serving(access_log=True, keys=("first-key", "second-key")) as serving:
        names = set()
        for key in ("first-key", "second-key", "wrong-key"):
            serving.ask("/v1/models", Authorization=f"Bearer {key}")
            (line,) = lines()
            assert not any("key" in value for value in line.values())
            names.add((line["key"], line["status"]))
    assert len(names) == 3 and ("-", "401") in names


def test_nothing_is_logged_unless_asked_for(capsys):
    with Serving() as serving:
        serving.chat(max_tokens=1)
        serving.ask("/nowhere")
    assert capsys.readouterr().err == ""
