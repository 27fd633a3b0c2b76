"""A server of a model of vectors and scores in this process, on a real socket."""

from __future__ import annotations

from typing import Any

from pace.server.embeddings.service import EmbeddingService
from pace.server.limits import Limits
from pace.server.options import ServeOptions
from tests.server.embeddings.fake_model import FakeModel
from tests.server.serving import Reply, Serving
from tests.waiting import wait_until


class EncodingServing(Serving):
    """A running server, for a `with` block. The end of the block checks that no request is in progress."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        """`options` are fields of `ServeOptions`, or names of limits."""
        names = Limits.names()
        limits = Limits(**{name: options.pop(name) for name in list(options) if name in names})
        self.options = ServeOptions("fake", served_model_names=("fake", "alias"), limits=limits, **options)
        self.service = EmbeddingService(self.options, {})
        self.model = FakeModel() if model is None else model
        self.service.use(self.model)

    def check_idle(self) -> None:
        """Waits until no request is in progress."""
        service = self.service
        wait_until(lambda: not (service.admission.num_requests or service.shared.large_bodies.num_bytes))

    def embed(self, texts: Any, **fields: Any) -> Reply:
        return self.ask("/v1/embeddings", {"input": texts, **fields})


def vectors(reply: Reply) -> list[list[float]]:
    assert reply.status == 200, reply.body
    data = reply.json["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]
