"""A model that generates and one that makes vectors, in one server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
from pace.server.models.shared import Shared
from pace.server.options import ModelEntry
from tests.server.models.serving import MODELS, SeveralServing
from tests.waiting import wait_until

service = pytest.importorskip("pace.server.embeddings.service")
checkpoints = pytest.importorskip("tests.server.embeddings.checkpoints")

TEXTS = ["the cat sat on the mat", "a dog in a hat"]


class KindsServing(SeveralServing):
    def _make(self, entry: ModelEntry, shared: Shared) -> Any:
        if entry.names[0] != "embed":
            return super()._make(entry, shared)
        arguments = {"model_name_or_path": entry.model, "dtype": "float32", "progress": False}
        return service.EmbeddingService(self.options.of(entry), arguments, shared)


def test_vectors_and_texts_at_once_and_after_an_unload(tmp_path: Path):
    checkpoints.make_checkpoint(tmp_path, "bert")
    with KindsServing({"chat": MODELS["chat"], "embed": tmp_path}, idle_unload=0.2) as several:

        def embed() -> list:
            reply = several.ask("/v1/embeddings", {"model": "embed", "input": TEXTS, "encoding_format": "float"})
            assert reply.status == 200, reply.body
            return [entry["embedding"] for entry in reply.json["data"]]

        vectors, text = embed(), several.tell("chat")
        assert several.loaded() == {"chat": True, "embed": True}
        assert (
            several.pool.find("embed").model.embedder.driver.turns is several.pool.find("chat").generator.driver.turns
        )
        wrong: list = []

        def ask(_: int) -> None:
            for _ in range(5):
                wrong.extend([True] * (embed() != vectors or several.tell("chat") != text))

        clients = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        assert not wrong
        assert several.ask("/v1/embeddings", {"input": TEXTS}).json["model"] == "embed"  # the first that has the path
        assert several.complete("x").json["model"] == "chat"
        assert several.ask("/v1/embeddings", {"model": "chat", "input": TEXTS}).status == 400
        assert several.ask("/v1/completions", {"model": "embed", "prompt": "x"}).status == 400
        wait_until(lambda: several.loaded() == {"chat": False, "embed": False})
        assert embed() == vectors and several.loaded() == {"chat": False, "embed": True}
        page = several.ask("/metrics").body.decode()
        assert 'pace:prompt_tokens_total{model_name="embed"}' in page and '{model_name="chat"}' in page
