"""HTTP/1.1 answers and the events in them, cut at every place where a network may cut them."""

from __future__ import annotations

import asyncio

import pytest

from pace.bench.serving.events import EventParser
from pace.bench.serving.http import Address, BadResponse, Client, ResponseParser
from tests.bench.serving.scripted_server import CLOSE, END, HEAD, chunk, serving, whole

EVENTS = b': hello\n\ndata: {"a": 1}\n\nevent: x\r\ndata: two\r\ndata:lines\r\n\r\ndata: [DONE]\n\n'
ANSWERS = {
    "chunked": HEAD + chunk(EVENTS[:9]) + chunk(EVENTS[9:30]) + chunk(EVENTS[30:]) + END,
    "chunk extensions and a trailer": HEAD + b"%X;name=1\r\n%s\r\n" % (len(EVENTS), EVENTS) + b"0\r\nA: b\r\n\r\n",
    "counted": b"HTTP/1.1 200 OK\r\ncontent-length:%d\r\n\r\n%s" % (len(EVENTS), EVENTS),
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + chunk(EVENTS) + END,
    "until the end": b"HTTP/1.0 200 OK\r\nServer: a: b\r\n\r\n" + EVENTS,
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_may_be_cut_anywhere(answer):
    data = ANSWERS[answer]
    for cut in range(len(data) + 1):
        http, events = ResponseParser(), EventParser()
        found = [e for part in (data[:cut], data[cut:]) for e in events.feed(http.feed(part))]
        assert http.status == 200
        if answer == "until the end":
            assert not http.is_done
            http.close()
        assert http.is_done and found == [b'{"a": 1}', b"two\nlines", b"[DONE]"], cut
        assert http.keeps_connection == (answer != "until the end")


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_may_come_byte_by_byte(answer):
    http = ResponseParser()
    assert b"".join(http.feed(bytes([byte])) for byte in ANSWERS[answer]) == EVENTS


@pytest.mark.parametrize("answer", [name for name in ANSWERS if name != "until the end"])
def test_an_answer_that_is_cut_off_is_none(answer):
    for end in range(len(ANSWERS[answer])):
        http = ResponseParser()
        http.feed(ANSWERS[answer][:end])
        with pytest.raises(ConnectionError):
            http.close()


@pytest.mark.parametrize(
    "data",
    [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
     HEAD + b"xyz\r\n", HEAD + b"1\r\nab\r\n", b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000],
)  # fmt: skip
def test_what_is_no_answer_is_refused(data):
    with pytest.raises(BadResponse):
        ResponseParser().feed(data)


def test_an_answer_without_a_body_is_done_at_once():
    for head in (b"HTTP/1.1 204 No\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"):
        http = ResponseParser()
        assert http.feed(head) == b"" and http.is_done and http.keeps_connection


@pytest.mark.parametrize(
    "url, expected",
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000, "", "127.0.0.1:8000")),
        ("http://localhost/v1/", ("localhost", 80, "", "localhost")),
        ("https://a.example/models/x", ("a.example", 443, "/models/x", "a.example")),
        ("http://[::1]:8000", ("::1", 8000, "", "[::1]:8000")),
    ],
)
def test_addresses(url, expected):
    address = Address.parse(url)
    assert (address.host, address.port, address.base, address.host_header) == expected


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http://me:secret@a"])
def test_what_is_no_address(url):
    with pytest.raises(ValueError) as error:
        Address.parse(url)
    assert "secret" not in str(error.value)


def test_connections_are_used_again_and_given_up_where_the_server_closed_them():
    def answer(index, body):
        yield 0, whole(200, index)
        if index == 2:
            yield 0, CLOSE

    async def talk():
        async with serving(answer) as server:
            client = Client(Address.parse(server.url), "secret")
            bodies = []
            for _ in range(5):
                bodies.append((await client.get("/x"))[1])
                await asyncio.sleep(0.01)
            client.close()
            return server, bodies

    server, bodies = asyncio.run(talk())
    assert bodies == [b"0", b"1", b"2", b"3", b"4"] and server.num_connections == 2
    assert server.heads[0].startswith(b"GET /x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization: Bearer secret\r\n" in server.heads[0]


def test_a_request_that_was_not_read_is_sent_again_once():
    """The server closes an idle connection just when the next request is sent."""

    def answer(index, body):
        yield (0, CLOSE) if index in (1, 3, 4) else (0, whole(200, index))

    async def talk():
        async with serving(answer) as server:
            client = Client(Address.parse(server.url))
            assert await client.get("/") == (200, b"0")
            assert await client.get("/") == (200, b"2")  # request 1 was not answered before the close
            with pytest.raises(ConnectionError):
                await client.get("/")  # nor was 3, nor 4 on a new connection
            client.close()

    asyncio.run(talk())
