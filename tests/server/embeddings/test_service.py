"""A server of vectors and scores as a whole: what it says about itself, its queue, clients that leave, its end."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from tests.server.embeddings.fake_model import WIDTH, FakeModel
from tests.server.embeddings.serving import EncodingServing, vectors
from tests.server.serving import QUESTION, read_reply, request_bytes
from tests.waiting import PATIENCE, wait_until

CHATS = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 5},
    "/prefixes": {"name": "a", "prompt": "a"},
}


def test_a_model_of_vectors_has_no_chat_and_says_what_it_has():
    with EncodingServing() as served:
        for path, body in CHATS.items():
            reply = served.ask(path, body)
            assert reply.status == 400 and "/v1/embeddings" in reply.body.decode() and path in reply.body.decode()


def test_a_model_of_text_needs_a_task_for_vectors(serving):
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        reply = serving.ask(path, body)
        assert reply.status == 400 and "--task embed" in reply.error["message"] and reply.error["param"] == "model"


def test_the_server_describes_its_model():
    with EncodingServing(FakeModel(labels=["a", "b"], matryoshka=[4, 8])) as served:
        entry = served.ask("/v1/models").json["data"][0]
        assert entry["max_model_len"] == 16 and entry["dimensions"] == WIDTH
        assert entry["tasks"] == ["embed", "classify"] == served.ask("/props").json["tasks"]
        assert served.ask("/props").json["matryoshka_dimensions"] == [4, 8]
        assert served.ask("/limits").json["inputs"] == 2048
        assert served.ask("/tokenize", {"prompt": "w4"}).json["count"] == 3
        assert served.ask("/health").status == served.ask("/ready").status == 200
        paths = served.ask("/openapi.json").json["paths"]
        assert {"/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/classify", "/embed", "/predict"} <= set(paths)
        assert served.ask("/v1/embeddings", {"input": "a", "model": "other"}).status == 404
        assert served.ask("/v1/embeddings", {"input": "a", "model": "alias"}).json["model"] == "alias"


def test_metrics_and_the_access_log_count_tokens(capfd):
    with EncodingServing(access_log=True) as served:
        served.embed(["w4", "w5 w6"])
        page = served.ask("/metrics").body.decode()
        assert "pace:prompt_tokens_total 7.0" in page and "pace:encoded_texts_total 2.0" in page
        assert 'pace:http_requests_total{route="/v1/embeddings",status="200"} 1.0' in page
    line = next(line for line in capfd.readouterr().err.splitlines() if "/v1/embeddings" in line)
    assert "prompt_tokens=7" in line and "w4" not in line


def asking(served: EncodingServing, texts: object, **fields: object) -> threading.Thread:
    thread = threading.Thread(target=served.embed, args=(texts,), kwargs=fields)
    thread.start()
    return thread


def test_a_full_queue_refuses_and_recovers(monkeypatch):
    monkeypatch.setattr("pace.server.embeddings.service.TEXTS_AT_ONCE", 1)
    with EncodingServing(max_queue=1) as served:
        served.model.embedder.gate.clear()
        threads = [asking(served, "w4") for _ in range(2)]
        wait_until(lambda: served.service.admission.num_requests == 2)
        reply = served.embed("w5")
        assert reply.status == 429 and int(reply.headers["retry-after"]) >= 1
        served.model.embedder.gate.set()
        for thread in threads:
            thread.join()
        assert served.embed("w5").status == 200


def test_the_rest_of_a_request_whose_client_left_is_not_computed(monkeypatch):
    monkeypatch.setattr("pace.server.embeddings.running.PART_TOKENS", 10)
    with EncodingServing() as served:
        served.model.embedder.gate.clear()
        connection = served.connect()
        connection.sendall(request_bytes("/v1/embeddings", {"input": ["w4 " * 10] * 100}))
        embedder = served.model.embedder
        wait_until(lambda: embedder.num_begun == 1 and embedder._threads._work_queue.qsize() == 1)
        connection.close()
        served.check_idle()
        served.model.embedder.gate.set()
        assert served.embed("w4").status == 200
        assert served.model.embedder.num_texts == 2  # the part that had begun, and the last request


def test_requests_that_outlast_the_drain_get_an_answer():
    with EncodingServing() as served:
        served.model.embedder.gate.clear()
        connection = served.connect()
        connection.sendall(request_bytes("/v1/embeddings", {"input": "w4"}))
        wait_until(lambda: served.service.admission.num_requests == 1)
        asyncio.run_coroutine_threadsafe(served.service.drain(0.05), served.loop).result(PATIENCE)
        reply = read_reply(connection)
        assert reply.status == 503 and "shutting down" in reply.error["message"]
        assert served.embed("w4").status == 503


def test_requests_that_end_within_the_drain_are_answered():
    with EncodingServing(FakeModel(labels=["a", "b"])) as served:
        gate = served.model.embedder.gate
        gate.clear()
        connections = [served.connect() for _ in range(2)]
        for connection, path in zip(connections, ("/v1/embeddings", "/v1/classify")):
            connection.sendall(request_bytes(path, {"input": "w4"}))
        wait_until(lambda: served.service.admission.num_requests == 2)
        drain = asyncio.run_coroutine_threadsafe(served.service.drain(PATIENCE), served.loop)
        wait_until(lambda: served.service.status == "draining")
        gate.set()
        replies = [read_reply(connection) for connection in connections]
        drain.result(PATIENCE)
        assert [reply.status for reply in replies] == [200, 200] and replies[1].json["data"][0]["label"] in ("a", "b")


def test_the_error_of_a_step_is_for_the_log(monkeypatch, caplog):
    with EncodingServing() as served:

        def fail(*_: object) -> None:
            raise RuntimeError("/home/secret")

        with monkeypatch.context() as patch:
            patch.setattr(served.model.embedder, "_compute", fail)
            reply = served.embed("w4")
        assert reply.status == 500 and b"secret" not in reply.body and "/home/secret" in caplog.text
        assert served.embed("w4").status == 200


def test_lower_priorities_are_earlier(monkeypatch):
    monkeypatch.setattr("pace.server.embeddings.service.TEXTS_AT_ONCE", 1)
    with EncodingServing(allow_priority=True) as served:
        gate = served.model.embedder.gate
        gate.clear()
        running = [asking(served, "w4") for _ in range(2)]
        wait_until(lambda: served.service.admission.num_requests == 2)

        waiting = []
        for number, priority in enumerate((50, 0, -50), 1):
            waiting.append(asking(served, f"w{10 + number}", priority=priority))
            wait_until(lambda: served.service.admission.num_waiting == number)
        gate.set()
        for thread in running + waiting:
            thread.join()
        assert [tokens[1] for tokens in served.model.embedder.computed[2:]] == [13, 12, 11]


def test_small_requests_run_next_to_a_large_one(monkeypatch):
    monkeypatch.setattr("pace.server.embeddings.running.PART_TOKENS", 10)
    with EncodingServing() as served:
        served.model.embedder.gate.clear()
        large = asking(served, ["w4 " * 10] * 200)
        wait_until(lambda: served.model.embedder._threads._work_queue.qsize())
        small = asking(served, "w5")
        wait_until(lambda: served.service.admission.num_requests == 2)
        served.model.embedder.gate.set()
        small.join()
        large.join()
        assert served.model.embedder.num_texts == 201


@pytest.mark.parametrize("fields", [{"priority": 5}, {"priority": -5}], ids=repr)
def test_priorities_are_allowed_by_the_operator(fields):
    with EncodingServing(allow_priority=True) as served:
        assert served.embed("w4", **fields).status == 200
        assert served.embed("w4", priority=101).status == 400


def test_the_openai_client():
    openai = pytest.importorskip("openai")
    with EncodingServing() as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
        answer = client.embeddings.create(model="fake", input=["w4", "w5"], dimensions=4)
        plain = vectors(served.embed(["w4", "w5"], dimensions=4))
        assert [entry.embedding for entry in answer.data] == [pytest.approx(row, abs=1e-7) for row in plain]
        assert answer.usage.total_tokens == 6
        with pytest.raises(openai.BadRequestError, match="input"):
            client.embeddings.create(model="fake", input=[])


def test_json_of_a_large_answer_is_one_line():
    with EncodingServing() as served:
        body = served.embed(["w4"] * 2048).body
        assert body.count(b"\n") == 0 and len(json.loads(body)["data"]) == 2048


def test_each_key_has_a_salt_of_its_own():
    with EncodingServing(keys=("first-key", "second-key")) as served:
        for key in ("first-key", "second-key", "first-key"):
            headers = {"authorization": f"Bearer {key}"}
            assert served.ask("/v1/embeddings", {"input": ["w4", "w5"]}, **headers).status == 200
        first, _, second, _, third, _ = salts = served.model.embedder.salts
        assert first == third != second and None not in salts and salts[::2] == salts[1::2]
