"""Limits of a connection, tested by sockets that exceed them."""

from __future__ import annotations

import os
import re
import socket
import time

import pytest

from tests.server.network.connections import GET, parts, read_all, read_answer, serving
from tests.waiting import PATIENCE, wait_until

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def assert_still_serves(running) -> None:
    with running.connect() as client:
        client.sendall(GET)
        assert parts(read_answer(client))[0] == 200


def assert_error(answer: bytes, status: int) -> dict:
    assert len(re.findall(rb"HTTP/1\.1 \d", answer)) == 1
    found, headers, body = parts(answer)
    assert found == status and headers["connection"] == "close" and headers["content-type"] == "application/json"
    return body["error"]


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_bytes",
    [HEAD + b"X: " + b"a" * 5000 + b"\r\n\r\n", HEAD + b"X: " + b"a" * 1_000_000, HEAD + b"a" * 1_000_000,
     b"GET /" + b"a" * 1_000_000, HEAD + b"".join(b"X%d: a\r\n" % k for k in range(21)) + b"\r\n",
     HEAD + b"X: a\r\n" * 10_000, CHUNKED + b"3\r\nabc\r\n0\r\nX: " + b"a" * 1_000_000,
     CHUNKED + b"3\r\nabc\r\n0\r\n" + b"X: a\r\n" * 10_000, CHUNKED + b"3;" + b"a" * 1_000_000],
    ids=["value", "open value", "name", "path", "lines", "many lines", "trailer", "trailers", "extension"],
)  # fmt: skip
def test_headers_are_bounded(request_bytes):
    with serving(header_bytes=4000, header_lines=20) as running:
        if b"Transfer" not in request_bytes:
            assert "4000 bytes" in assert_error(running.say(request_bytes), 431)["message"]
            assert not running.app.calls
        else:
            assert_error(running.say(request_bytes), 431)
        assert_still_serves(running)
        wait_until(lambda: not running.connections)


def test_a_header_in_pieces_is_bounded():
    with serving(header_bytes=4000) as running, running.connect() as client:
        client.sendall(HEAD + b"X: ")
        sent = 0
        while sent < 50_000:
            client.sendall(b"a" * 1000)
            sent += 1000
            time.sleep(0.001)
        assert_error(read_all(client), 431)


def test_headers_up_to_the_bound_are_served():
    with serving(header_bytes=4000, header_lines=20) as running:
        lines = b"".join(b"X%d: a\r\n" % k for k in range(18)) + b"Connection: close\r\n"
        assert parts(running.say(HEAD + lines + b"\r\n"))[0] == 200
        assert parts(running.say(HEAD + b"Connection: close\r\nX: " + b"a" * 3500 + b"\r\n\r\n"))[0] == 200


@pytest.mark.parametrize("size, status", [(1000, 200), (1001, 413), (3_000_000, 413)])
@pytest.mark.parametrize("form", ["length", "chunked"])
def test_bodies_are_bounded(form, size, status):
    body = b"a" * size
    with serving(body_bytes=1000) as running:
        head = HEAD + b"Connection: close\r\n"
        if form == "length":
            answer = running.say(head + b"Content-Length: %d\r\n\r\n" % size, body)
        else:
            chunks = [b"%x\r\n%s\r\n" % (len(body[k : k + 400]), body[k : k + 400]) for k in range(0, size, 400)]
            answer = running.say(head + b"Transfer-Encoding: chunked\r\n\r\n", *chunks[:4000], b"0\r\n\r\n")
        if status == 200:
            assert parts(answer)[2]["body"] == body.decode()
        else:
            assert "1000 bytes" in assert_error(answer, 413)["message"]
            wait_until(lambda: len(running.app.gone) == len(running.app.calls) == (form == "chunked"))
        assert_still_serves(running)


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_an_answer_before_the_end_of_a_body_arrives(more):
    head = f"POST /early HTTP/1.1\r\nHost: localhost\r\n{more}Content-Length: 400000\r\n\r\n".encode()
    with serving() as running, running.connect() as client:
        client.sendall(head + b"x" * 1000)
        time.sleep(0.05)
        for _ in range(3):
            client.sendall(b"x" * 133_000)
            time.sleep(0.01)
        assert parts(read_answer(client))[0] == 200
        client.shutdown(socket.SHUT_WR)
        wait_until(lambda: not running.connections)


def test_errors_have_the_form_of_their_path():
    with serving(body_bytes=10) as running:
        request = b"POST /v1/messages?beta=true HTTP/1.1\r\nHost: localhost\r\nContent-Length: 11\r\n\r\n"
        status, _, body = parts(running.say(request))
        assert status == 413 and body["type"] == "error" and body["error"]["type"] == "request_too_large"


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces, what, seconds",
    [([b"G", b"E", b"T /echo HTTP/1.1\r\n", b"X: 1\r\n"], "headers", 10.0),
     ([HEAD + b"Content-Length: 100\r\n\r\n", b"a", b"a", b"a"], "body", 60.0)],
    ids=["headers", "body"],
)  # fmt: skip
def test_slow_headers_and_bodies_are_given_up(pieces, what, seconds):
    """A piece that comes in time gives no time to the next."""
    with serving() as running:
        with running.connect() as client:
            wait_until(lambda: running.connections)
            for piece in pieces:
                assert running.connections
                client.sendall(piece)
                running.pass_time(0.3 * seconds)
            assert what in assert_error(read_all(client), 408)["message"]
        wait_until(lambda: running.app.gone == (["/echo"] if what == "body" else []))
        assert_still_serves(running)


@pytest.mark.parametrize("data", [b"", b"\r\n", b"\r\n\r\n\r\n"])
def test_a_connection_without_a_request_is_closed(data):
    with serving() as running, running.connect() as client:
        wait_until(lambda: running.connections)
        client.sendall(data)
        running.pass_time(0.9 * running.options.limits.header_seconds)
        assert running.connections
        running.pass_time(0.2 * running.options.limits.header_seconds)
        assert read_all(client) == b""


def test_an_answer_may_take_longer_than_a_request():
    with serving() as running, running.connect() as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: running.app.calls == ["/wait"])
        running.pass_time(1000)
        assert running.app.gone == []
        client.sendall(b"\r\n")
        running.pass_time(1000)
        assert running.app.gone == [] and len(running.connections) == 1


def test_slow_clients_hold_up_nobody():
    with serving(header_seconds=10 * PATIENCE, body_seconds=10 * PATIENCE) as running:
        slow = [running.connect() for _ in range(100)]
        for client in slow:
            client.sendall(HEAD + b"X: ")
        for _ in range(20):
            assert_still_serves(running)  # or not at all, if it waited for the slow ones
        for client in slow:
            client.close()
        wait_until(lambda: not running.connections)


def test_a_reader_that_stops_is_given_up():
    with serving(send_buffer=4096) as running, running.connect(receive_buffer=4096) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        client.recv(100)
        (connection,) = running.connections
        running.pass_time_until(lambda: running.app.gone == ["/flood"], running.options.limits.write_seconds)
        assert connection.transport.get_write_buffer_size() <= 128 << 10
        wait_until(lambda: not running.connections)


def test_a_slow_reader_is_not_given_up():
    with serving(send_buffer=4096) as running, running.connect(receive_buffer=4096) as client:
        client.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(100)
        (connection,) = running.connections
        for _ in range(6):
            size = connection.transport.get_write_buffer_size()
            while connection.transport.get_write_buffer_size() == size:
                assert client.recv(4096)
            running.pass_time(0.9 * running.options.limits.write_seconds)
        assert running.app.gone == []


def test_an_answer_that_nobody_reads_is_given_up():
    """Less than a full buffer is left to send, so the application has finished."""
    with serving(send_buffer=4096) as running, running.connect(receive_buffer=4096) as client:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        wait_until(lambda: running.app.calls == ["/large"])
        running.pass_time(0.9 * running.options.limits.write_seconds)
        assert len(running.connections) == 1
        running.pass_time_until(lambda: not running.connections, 0.9 * running.options.limits.write_seconds)


# -- connections -------------------------------------------------------------------------------------------------------


def test_connections_are_bounded():
    with serving(connections=2) as running:
        first, second = running.connect(), running.connect()
        wait_until(lambda: len(running.connections) == 2)
        answer = running.say(GET)
        assert_error(answer, 503)
        assert parts(answer)[1]["retry-after"] == "1"
        first.close()
        wait_until(lambda: len(running.connections) == 1)
        assert_still_serves(running)
        second.close()


def test_connections_that_are_dropped_leak_nothing():
    with serving() as running:
        assert_still_serves(running)
        wait_until(lambda: not running.connections)
        before = len(os.listdir("/proc/self/fd"))
        for k in range(300):
            with running.connect() as client:
                if k % 3:
                    client.sendall(GET if k % 2 else HEAD)
        wait_until(lambda: not running.connections)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert_still_serves(running)


@pytest.mark.parametrize("how", ["close", "half, then close"])
@pytest.mark.parametrize("more", [b"", b"\r\n", GET], ids=["one", "empty line", "pipelined"])
def test_the_application_hears_of_a_client_that_goes(how, more):
    with serving() as running, running.connect() as client:
        client.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n" + more)
        wait_until(lambda: running.app.calls == ["/wait"])
        if how != "close":
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.1)
            assert not running.app.gone
        client.close()
        wait_until(lambda: running.app.gone == ["/wait"])
        wait_until(lambda: not running.connections)


def test_a_client_that_sends_no_more_is_answered_after_an_interim_response():
    with serving() as running, running.connect() as client:
        client.sendall(HEAD + b"Content-Length: 3\r\n\r\nabc")
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        status, headers, body = parts(answer)
        assert status == 200 and body["body"] == "abc"


def test_half_a_request_is_no_request():
    with serving() as running, running.connect() as client:
        client.sendall(HEAD + b"Content-Length: 3\r\n\r\na")
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
        wait_until(lambda: not running.connections)


def test_refusals_have_a_request_id():
    with serving() as running:
        _, headers, _ = parts(running.say(b"GET / HTTP/1.1\r\n\r\n"))
        assert headers["x-request-id"].startswith("req_")
        wrong = b"POST /v1/messages HTTP/1.1\r\nX-Request-Id: mine\r\nHost: a\r\nHost: b\r\n\r\n"
        _, headers, _ = parts(running.say(wrong))
        assert headers["x-request-id"] == headers["request-id"] == "mine"


def test_the_system_sends_at_once_and_probes_silent_peers():
    with serving(write_seconds=7) as running, running.connect():
        wait_until(lambda: running.connections)
        (connection,) = running.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


# -- forms of HTTP -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain():
    with serving() as running:
        yield running


HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
     HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
     HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" % (5 + len(HIDDEN)) + HIDDEN,
     HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + HIDDEN,
     HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + HIDDEN,
     HEAD + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + HIDDEN, HEAD + b"Content-Length: +3\r\n\r\nabc",
     HEAD + b"Content-Length: 1e2\r\n\r\nabc", HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nabc",
     HEAD + b"X: a\r\n continued\r\n\r\n", HEAD + b"X: a\x00b\r\n\r\n", HEAD + b"Host: other\r\n\r\n",
     HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
     HEAD + b"Connection: upgrade\r\nUpgrade: x\r\nTransfer-Encoding: chunked\r\n\r\n" + HIDDEN,
     CHUNKED + b"g\r\n" + HIDDEN, b"GET /echo HTTP/1.1\r\n\r\n", b"GET /echo HTTP/1.1\nHost: localhost\n\n",
     b"GET /echo HTTP/2.0\r\nHost: localhost\r\n\r\n", b"GET /echo HTTP/9.9\r\nHost: localhost\r\n\r\n",
     b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
     b"GET http://localhost HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
     b"nonsense\r\n\r\n"],
)  # fmt: skip
def test_what_could_be_read_in_two_ways_is_refused(plain, request_bytes):
    assert_error(plain.say(request_bytes), 400)
    assert "/hidden" not in plain.app.calls
    assert_still_serves(plain)


def test_forms_that_are_served():
    close = b"Host: localhost\r\nConnection: close\r\n"
    with serving() as running:
        assert parts(running.say(b"GET /echo HTTP/1.0\r\n\r\n"))[0] == 200
        assert parts(running.say(b"GET http://localhost/echo?a=1 HTTP/1.1\r\n" + close + b"\r\n"))[2]["path"] == "/echo"
        upgrade = b"GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: upgrade, close\r\nUpgrade: websocket\r\n\r\n"
        assert parts(running.say(upgrade))[0] == 200
        trailers = b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nAuthorization: Bearer late\r\n\r\n"
        body = parts(running.say(b"POST /echo HTTP/1.1\r\n" + close + trailers))[2]
        assert body["body"] == "abc" and "authorization" not in body["headers"]
        head = running.say(b"HEAD /echo HTTP/1.1\r\n" + close + b"\r\n")
        assert head.startswith(b"HTTP/1.1 200") and head.endswith(b"\r\n\r\n")
        assert b"server:" not in head.lower() and b"date:" in head.lower()
        zipped = parts(running.say(b"GET /echo HTTP/1.1\r\nAccept-Encoding: gzip\r\n" + close + b"\r\n"))
        assert zipped[0] == 200 and "content-encoding" not in zipped[1]


def test_a_connection_is_used_again():
    with serving() as running, running.connect() as client:
        for k in range(3):
            client.sendall(HEAD + b"Content-Length: 1\r\n\r\n%d" % k)
            assert parts(read_answer(client))[2]["body"] == str(k)
        client.sendall(b"POST /early HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n")
        assert parts(read_answer(client))[2]["path"] == "/early"
        client.sendall(b"abc" + GET)
        assert parts(read_answer(client))[2]["path"] == "/echo"


def test_a_body_is_asked_for():
    with serving() as running, running.connect() as client:
        client.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        assert parts(read_answer(client))[2]["body"] == "abc"


def test_of_requests_in_a_row_the_first_is_answered():
    with serving() as running:
        status, _, body = parts(running.say(GET + HIDDEN + HIDDEN))
        assert status == 200 and body["path"] == "/echo" and running.app.calls == ["/echo"]
