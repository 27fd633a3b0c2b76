"""Images that requests name by URL, from hosts that the operator allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pace.server.options import ServeOptions
from tests.llm.fake_media import MediaGenerator, png, runs, wav
from tests.server.network.image_host import ImageHost, sized
from tests.server.schemas.test_media import block, image_url, said, text
from tests.server.serving import Serving, shared_generator

PLACE = "messages[0].content[1]"


@pytest.fixture(scope="module")
def host() -> Iterator[ImageHost]:
    with ImageHost(sized(png(24, 16))) as running:
        yield running


@pytest.fixture(scope="module")
def serving(host) -> Iterator[Serving]:
    generator = MediaGenerator()
    with Serving(generator, media_hosts=("a.example", host.name), images=2) as running:
        yield running
    generator.driver.close()


@pytest.fixture(autouse=True)
def image(host) -> None:
    host.answer = sized(png(24, 16))
    host.requests.clear()


def url_block(url: str) -> dict:
    return {"type": "image", "source": {"type": "url", "url": url}}


def test_forms(serving, host):
    url = host.url("/a.png?n=1")
    result = {"type": "tool_result", "tool_use_id": "t", "content": [url_block(url)]}
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    tools = [{"name": "look", "description": "", "input_schema": {"type": "object"}}]
    for path, body in (
        ("/v1/chat/completions", {"messages": said([text("see"), image_url(url, detail="high")]), "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": said([{"type": "image_url", "image_url": url}]), "max_tokens": 1}),
        ("/v1/responses", {"input": said([{"type": "input_image", "image_url": url}]), "max_output_tokens": 1}),
        ("/v1/messages", {"messages": said([url_block(url)]), "max_tokens": 1}),
        ("/v1/messages", {"messages": [*said([text("look")]), *said([call], "assistant"), *said([result])],
                          "tools": tools, "max_tokens": 1}),
    ):  # fmt: skip
        host.requests.clear()
        reply = serving.ask(path, body)
        assert reply.status == 200, reply.body
        assert runs(*serving.generator.seen[-1]) == [("image", 6)]
        assert len(host.requests) == 1 and host.requests[0].startswith(b"GET /a.png?n=1 HTTP/1.1\r\n")
    counted = serving.ask("/v1/messages/count_tokens", {"messages": said([url_block(url)])})
    given = serving.ask("/v1/messages/count_tokens", {"messages": said([block(png(24, 16))])})
    assert counted.json == given.json
    assert serving.ask("/tokenize", {"messages": said([image_url(url)])}).json["tokens"].count(0) == 6


def test_images_by_url_and_in_the_request(serving, host):
    assert serving.chat(said([image_url(host.url()), image_url()]), max_tokens=1).status == 200
    assert [tokens for _, tokens in runs(*serving.generator.seen[-1])] == [6, 2]


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "https://b.example/a.png", "http://169.254.169.254/"])
def test_other_hosts_are_not_contacted(serving, host, url):
    reply = serving.chat(said([text("x"), image_url(url)]))
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "unsupported_parameter", PLACE)
    assert not host.requests


def test_requests_that_are_refused_before_anything_is_fetched(serving, host):
    one = image_url(host.url())
    assert serving.chat(said([one]), model="other").status == 404
    error = serving.chat(said([one, one, one])).error
    assert error["message"] == "messages[0].content[2] is one of more than 2 images, the maximum of a request"
    assert not host.requests


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(sized(b"<html>secret"), "is not an image in a known format"), (sized(wav()), "is not an image"),
     (sized(b""), "is not an image"),
     (sized(png()[:20]), "messages[0].content[1]"), (b"HTTP/1.1 404 secret\r\n\r\n", "answered 404")],
)  # fmt: skip
def test_what_hosts_send_is_not_trusted(serving, host, answer, problem):
    host.answer = answer
    reply = serving.chat(said([text("x"), image_url(host.url("/?secret"))]))
    assert reply.status == 400 and problem in reply.error["message"] and reply.error["param"] == PLACE
    assert b"secret" not in reply.body


def test_fetched_images_count_as_large_bodies(serving, host):
    host.answer = sized(png() + bytes(50_000))
    generator = MediaGenerator()
    with Serving(generator, media_hosts=(host.name,), body_bytes=10_000, large_body_bytes=60_000) as small:
        assert small.chat(said([image_url(host.url())]), max_tokens=1).status == 200
        assert small.chat(said([image_url(host.url())] * 2), max_tokens=1).status == 429
    generator.driver.close()


def test_options_that_do_not_fit():
    for hosts in (("https://a.example",), ("a.example/x",), ("::1",), ("",), ("a.example:",), ("*",), ("u@a.example",)):
        with pytest.raises(ValueError, match="media_hosts: .* must be HOST or HOST:PORT"):
            ServeOptions("tiny", media_hosts=hosts)
    assert ServeOptions("tiny", media_hosts=("A.example", "[::1]:80", "10.0.0.1", "a.example:8080"))
    with pytest.raises(ValueError, match="media_hosts needs media=image"):
        ServeOptions("tiny", media_hosts=("a.example",), media=("audio",))
    with pytest.raises(ValueError, match="media_hosts=a.example: this model takes no images"):
        Serving(shared_generator(), media_hosts=("a.example",))
