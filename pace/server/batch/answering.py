"""Answers the requests of a batch with a model in this process, as the server would."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pace.server.endpoints import ENDPOINTS, GenerationEndpoint, TranscriptionEndpoint
from pace.server.errors import ApiError, invalid
from pace.server.limits import Limits
from pace.server.options import ServeOptions
from pace.server.schemas.fields import parse
from pace.server.service import Service

logger = logging.getLogger("pace")

PATHS = {
    endpoint.paths[0]: endpoint
    for endpoint in ENDPOINTS
    if isinstance(endpoint, GenerationEndpoint)
    and not isinstance(endpoint, TranscriptionEndpoint)  # lines have no files
    and not endpoint.is_anthropic
}
FOREVER = 1e9
"""Seconds."""
MAX_NAMED = 20
"""Maximum number of unknown fields named in the log."""


def batch_options(model: str, names: Sequence[str], any_model_name: bool) -> ServeOptions:
    """Returns options of a `Service` for a batch. Requests name the model by `names`, or by any name, and get the
    priority that they ask for. The limits of one request are those of a server; the queue and the waiting time are
    unlimited."""
    limits = Limits(max_wait=FOREVER, max_queue=1 << 30)
    return ServeOptions(
        model, served_model_names=tuple(names), any_model_name=any_model_name, allow_priority=True, limits=limits
    )


class Answering:
    """`await answering(url, body)` returns the status and the body that the server would answer with."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ignored: set[str] = set()

    async def __call__(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            if (endpoint := PATHS.get(url)) is None:
                message = f"url must be one of {', '.join(PATHS)}; got {url[:80]!r}"
                raise ApiError(404, message, code="invalid_url")
            return 200, await self._answer(endpoint, body)
        except ApiError as error:
            return error.status, error.openai()
        except Exception as error:
            logger.error("a request failed: %r", error, exc_info=error)
            return 500, ApiError(500, "pace failed at this request").openai()

    async def _answer(self, endpoint: GenerationEndpoint, body: dict[str, Any]) -> dict[str, Any]:
        request, ignored = parse(endpoint.schema, body)
        self._name(ignored[:MAX_NAMED])
        if request.stream:
            raise invalid("stream", "is not supported in a batch; leave it out")
        async with endpoint.generate(self._service, request) as (form, answer):
            return form.whole(await answer.whole(), answer.usage)

    def _name(self, ignored: list[str]) -> None:
        """Logs unknown fields, each once."""
        for name in ignored:
            if name not in self._ignored and len(self._ignored) < MAX_NAMED:
                self._ignored.add(name)
                logger.warning("unknown field %r ignored", name[:60])
