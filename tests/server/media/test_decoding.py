"""Workers that decode images: two at once, with a deadline, and a bound on what is decoded."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.llm.fake_media import MediaGenerator, png
from tests.server.schemas.test_media import data_url, image_url, said, text
from tests.server.serving import ANSWER, QUESTION, Serving, request_bytes
from tests.waiting import Gate, wait_until


def ask(serving: Serving, *sizes: int, **fields):
    """Sends images of these widths, in tokens."""
    parts = [image_url(data_url(png(8 * size, 8))) for size in sizes]
    return serving.chat(said([*parts, text("What?")]), max_tokens=2, **fields)


@pytest.fixture
def generator():
    generator = MediaGenerator()
    yield generator
    generator.driver.close()


def test_two_at_once_and_text_does_not_wait(generator):
    generator.image.gate = gate = Gate()
    with Serving(generator) as serving, ThreadPoolExecutor(5) as clients:
        replies = [clients.submit(ask, serving, 1, 2, 3) for _ in range(4)]
        wait_until(lambda: generator.image.num_at_once == 2)
        assert serving.chat(QUESTION, max_tokens=30).json["choices"][0]["message"]["content"] == ANSWER
        assert generator.image.num_decoded == 2
        gate.open()
        assert [reply.result().status for reply in replies] == [200] * 4
    assert generator.image.max_at_once == 2 and generator.image.num_decoded == 12


def test_a_deadline(generator):
    generator.image.gate = gate = Gate()
    with Serving(generator, media_seconds=30.0) as serving, ThreadPoolExecutor(3) as clients:
        others = [clients.submit(ask, serving, 1) for _ in range(2)]
        wait_until(lambda: generator.image.num_at_once == 2)
        last = clients.submit(ask, serving, 1)
        wait_until(lambda: serving.service.shared.media_workers._pool._work_queue.qsize() == 1)
        serving.pass_time(30.0)
        assert last.result().status == 503 and last.result().headers["retry-after"] == "5"
        for other in others:
            assert other.result().status == 400 and other.result().error["param"] == "messages[0].content[0]"
            assert "take more than 30 s to decode" in other.result().error["message"]
        gate.open()
        assert ask(serving, 1).status == 200


def test_a_bound_on_what_is_decoded(generator):
    """A request waits until others have room for its images; one that is larger than the bound runs alone."""
    running, most, lock = 0, 0, threading.Lock()
    original = generator.sequences_of

    def counted(call, index):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return original(call, index)

    generator.sequences_of = counted
    with Serving(generator, media_tokens=10) as serving, ThreadPoolExecutor(4) as clients:
        replies = [clients.submit(ask, serving, 6) for _ in range(3)]
        assert [reply.result().status for reply in replies] == [200] * 3
        assert most == 1
        assert ask(serving, 30).status == 200
        replies = [clients.submit(ask, serving, 5) for _ in range(2)]
        assert [reply.result().status for reply in replies] == [200] * 2
        assert serving.service.shared.media_workers._num_tokens == 0


def test_a_client_that_leaves(generator):
    """Its images that wait are not decoded, and others are served."""
    generator.image.gate = gate = Gate()
    with Serving(generator) as serving:
        parts = [image_url(data_url(png(8, 8, level))) for level in range(8)]
        with serving.connect() as connection:
            connection.sendall(request_bytes("/v1/chat/completions", {"messages": said(parts)}))
            wait_until(lambda: generator.image.num_at_once == 2)
        wait_until(lambda: not serving.service.admission.num_requests)
        gate.open()
        assert ask(serving, 1).status == 200
        assert generator.image.num_decoded <= 2 + 1
        serving.check_idle()
        assert serving.service.shared.media_workers._num_tokens == 0


def test_an_error_ends_a_request(generator):
    """Images after one that cannot be decoded are not decoded."""
    generator.image.gate = gate = Gate()
    with Serving(generator) as serving:
        parts = [image_url(data_url(png() + b"broken")), *[image_url(data_url(png(8, 8, at))) for at in range(9)]]
        reply = serving.chat(said(parts))
        assert reply.status == 400 and reply.error["param"] == "messages[0].content[0]"
        gate.open()
        assert ask(serving, 1).status == 200
        assert generator.image.num_decoded <= 1 + 2 + 1
