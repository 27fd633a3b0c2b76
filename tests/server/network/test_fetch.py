"""Files from allowed hosts: which addresses are contacted, and answers that are wrong, large, slow or redirected."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time

import pytest

pytest.importorskip("httptools")

from pace.server.errors import ApiError
from pace.server.network import fetch
from pace.server.network.fetch import Fetcher, is_allowed
from tests.server.network.image_host import OK, ImageHost, sized
from tests.server.test_options import certificates  # noqa: F401
from tests.waiting import PATIENCE

DATA = bytes(range(256)) * 20
MAX_BYTES = 10_000


def fetched(*urls: str, hosts: tuple[str, ...], cafile: str | None = None, check=lambda num_bytes: None) -> list[bytes]:
    fetcher = Fetcher(hosts, MAX_BYTES, 4 * MAX_BYTES)
    if cafile:
        fetcher.tls.load_verify_locations(cafile)
    try:
        return asyncio.run(fetcher.fetch([(f"part{n}", fetcher.find(url)) for n, url in enumerate(urls)], check))
    finally:
        fetcher.close()


def refused(*urls: str, hosts: tuple[str, ...], **more) -> ApiError:
    with pytest.raises(ApiError) as caught:
        fetched(*urls, hosts=hosts, **more)
    assert caught.value.status == 400 and "secret" not in caught.value.message
    return caught.value


def chunked(data: bytes, size: int = 1000) -> bytes:
    pieces = [data[at : at + size] for at in range(0, len(data), size)] + [b""]
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces)


# -- which URLs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://a.example/x/y.png?size=2&n=%20#part",
        ("https", "a.example", 443, "a.example", "/x/y.png?size=2&n=%20")),
        ("HTTP://A.Example", ("http", "a.example", 80, "a.example", "/")),
        ("http://a.example?x", ("http", "a.example", 80, "a.example", "/?x")),
        ("https://a.example:443/", ("https", "a.example", 443, "a.example", "/")),
        ("http://b.example:8080/x", ("http", "b.example", 8080, "b.example:8080", "/x")),
        ("https://b.example:8080/x", ("https", "b.example", 8080, "b.example:8080", "/x")),
        ("http://[::1]:90/", ("http", "::1", 90, "[::1]:90", "/")),
        ("http://10.0.0.5/", ("http", "10.0.0.5", 80, "10.0.0.5", "/")),
    ],
)  # fmt: skip
def test_urls_of_allowed_hosts(url, address):
    found = Fetcher(("a.EXAMPLE", "b.example:8080", "[::1]:90", "10.0.0.5"), 1, 1).find(url)
    assert (found.scheme, found.host, found.port, found.authority, found.target) == address


@pytest.mark.parametrize(
    "url",
    [
        "https://b.example/", "http://b.example:80/", "http://a.example:8080/", "http://a.example:443/",
        "https://a.example:80/",
        "https://x.a.example/", "https://a.example.evil.example/", "https://a.example./",
        "https://evil.example/a.example",
        "https://evil.example#a.example", "https://evil.example?a.example/", "https://a.example@evil.example/",
        "https://a.example:443@evil.example/", "https://user@a.example/", "https://u:p@a.example/",
        "https://evil.example\\@a.example/",
        "https://a.example\\.evil.example/", "https://a.example:99999999/", "https://a.example:/x@y:1/",
        "https:a.example/", "//a.example/",
        "https:///a.example/", "ftp://a.example/", "file://a.example/", "gopher://a.example/", "https://a.example/ x",
        " https://a.example/",
        "https://a.example/\r\nX: y", "https://a.example/x\n", "https://a.example/\u00e9", "https://\uff41.example/",
        "http\u017f://a.example/",
        "https://a%2eexample/", "https://[::1]/", "https://127.0.0.1/", "http://169.254.169.254/latest",
        "https://a.example/" + "x" * 9000, "",
    ],
)  # fmt: skip
def test_other_urls_are_not_fetched(url):
    assert Fetcher(("a.example", "b.example:8080"), 1, 1).find(url) is None


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.8.8", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%lo", "fc00::1",
        "ff02::1",
        "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "::127.0.0.1",
        "2001:db8::1",
    ],
)  # fmt: skip
def test_addresses_that_a_name_may_not_have(address):
    assert not is_allowed(address, "a.example")
    assert not is_allowed(address, "8.8.8.8"), "an address stands for itself only"
    assert is_allowed(address, address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_addresses_that_a_name_may_have(address):
    assert is_allowed(address, "a.example")


def resolve_to(monkeypatch, *answers: list[str]) -> list[str]:
    """Makes each lookup of a name one of `answers`. Returns the names that were looked up."""
    asked, real = [], socket.getaddrinfo

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        return [info for one in answers[len(asked) - 1] for info in real(one, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["127.0.0.1", "8.8.8.8"]])
def test_names_of_private_addresses_are_not_contacted(monkeypatch, addresses):
    with ImageHost(sized(DATA)) as host:
        resolve_to(monkeypatch, addresses)
        error = refused(f"http://a.example:{host.port}/?secret", hosts=(f"a.example:{host.port}",))
        assert error.message == f"part0 was not fetched from a.example:{host.port}: it is not a public address"
        time.sleep(0.05)
        assert not host.requests and not host.most_open


def test_a_name_is_looked_up_once(monkeypatch):
    """A second lookup might give an address that was not checked."""
    with ImageHost(sized(DATA)) as host, ImageHost(sized(b"private")) as private:
        monkeypatch.setattr(fetch, "_is_public", lambda address: str(address) == "127.0.0.1")
        asked = resolve_to(monkeypatch, ["127.0.0.1"])
        url = f"http://a.example:{host.port}/x?y"
        assert fetched(url, hosts=(f"a.example:{host.port}",)) == [DATA]
        assert asked == ["a.example"] and not private.requests
        lines = host.requests[0].split(b"\r\n")
        assert lines[:2] == [b"GET /x?y HTTP/1.1", b"Host: a.example:%d" % host.port]


def test_names_without_an_address(monkeypatch):
    def fails(*args, **kwargs):
        raise socket.gaierror(-2, "unknown secret")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert "there is no connection" in refused("http://a.example/", hosts=("a.example",)).message


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [sized(DATA), chunked(DATA), OK + b"\r\n" + DATA, sized(DATA) + b"more"])
def test_answers(answer):
    with ImageHost(answer) as host:
        assert fetched(host.url(), hosts=(host.name,)) == [DATA]


def forever(head: bytes, piece: bytes):
    def answer(connection):
        connection.sendall(head)
        while True:
            connection.sendall(piece)

    return answer


ENDLESS = {
    "body": forever(OK + b"\r\n", bytes(1000)),
    "chunks": forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"3e8\r\n" + bytes(1000) + b"\r\n"),
    "extensions": forever(OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 5000 + b"\r\na\r\n"),
    "headers": forever(OK, b"X: " + b"y" * 100 + b"\r\n"),
    "header": forever(OK + b"X: ", b"y" * 100),
}


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(sized(DATA)[:-1], "ended early"), (chunked(DATA)[:-5], "ended early"), (OK, "ended early"), (b"", "ended early"),
     (sized(b"", b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/secret\r\n"),
     "answered 302, and redirects are not"),
     (sized(DATA, b"HTTP/1.1 404 Not Found\r\n"), "answered 404"),
     (sized(DATA, b"HTTP/1.1 206 Partial\r\n"), "answered 206"),
     (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nsecret", "was not fetched"),
     (b"SSH-2.0-secret\r\n", "not HTTP"), (OK + b"Content-Length: x\r\n\r\n", "not HTTP"),
     (sized(bytes(MAX_BYTES + 1)), "more than 10000"),
     (ENDLESS["body"], "more than 10000"), (ENDLESS["chunks"], "more than 10000"),
     (ENDLESS["extensions"], "more than 10000"),
     (ENDLESS["headers"], "headers of its answer"), (ENDLESS["header"], "headers of its answer")],
)  # fmt: skip
def test_answers_that_are_refused(answer, problem):
    with ImageHost(answer) as host:
        error = refused(host.url("/a?secret"), hosts=(host.name,))
        assert problem in error.message and error.param == "part0" and host.name in error.message
        assert len(host.requests) == 1


def test_a_host_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = f"127.0.0.1:{listener.getsockname()[1]}"
    assert "there is no connection" in refused(f"http://{name}/?secret", hosts=(name,)).message


def test_slow_answers(monkeypatch):
    """Each byte comes in time, and all of them do not."""

    def drip(connection):
        for byte in sized(DATA):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    monkeypatch.setattr(fetch, "SECONDS", 0.4)
    for answer in (drip, lambda connection: connection.recv(1)):
        with ImageHost(answer) as host:
            assert "took more than 0.4 s" in refused(*[host.url()] * 6, hosts=(host.name,)).message
            assert host.num_accepted <= 4, "the time is that of all, so the last ones were not begun"


def test_four_at_once():
    four, unanswered, counts = threading.Barrier(4), [], []

    def answer(connection):
        unanswered.append(connection)
        four.wait(PATIENCE)
        counts.append(len(unanswered))
        time.sleep(0.05)  # in which a fifth would come
        counts.append(len(unanswered))
        unanswered.remove(connection)
        connection.sendall(sized(b"x"))

    with ImageHost(answer) as host:
        assert fetched(*[host.url()] * 8, hosts=(host.name,)) == [b"x"] * 8
        assert max(counts) == 4


def test_the_files_of_a_request_are_bounded_together():
    with ImageHost(sized(bytes(9000))) as host:
        seen = []
        assert len(fetched(*[host.url()] * 4, hosts=(host.name,), check=seen.append)) == 4
        assert seen == sorted(seen) and seen[-1] == 36_000
        assert "exceeds 40000 bytes" in refused(*[host.url()] * 5, hosts=(host.name,)).message


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_certificates_are_checked(certificates, monkeypatch):  # noqa: F811
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates["one.pem"], certificates["one.key"])
    monkeypatch.setattr(fetch, "_is_public", lambda address: True)
    with ImageHost(sized(DATA), lambda connection: context.wrap_socket(connection, server_side=True)) as host:
        names = (f"localhost:{host.port}", host.name)
        urls = [f"https://{name}/" for name in names]
        known = str(certificates["one.pem"])
        assert fetched(urls[0], hosts=names, cafile=known) == [DATA]
        assert "certificate is not valid" in refused(urls[0], hosts=names).message
        assert "certificate is not valid" in refused(urls[1], hosts=names, cafile=known).message, "of another name"
        assert len(host.requests) == 1
