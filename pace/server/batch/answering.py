"""Answers the requests of a batch with a model in this process, as the server would."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from pace.server.errors import ApiError
from pace.server.kinds import GENERATING, Generating
from pace.server.limits import Limits
from pace.server.options import ServeOptions
from pace.server.schemas.fields import parse
from pace.server.service import Service

logger = logging.getLogger("pace")

PATHS = {path: kind for kind in GENERATING for path in kind.paths if path.startswith("/v1/") and not kind.is_anthropic}

FOREVER = 1e9
"""Seconds."""
MOST_NAMED = 20
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
            if (kind := PATHS.get(url)) is None:
                raise ApiError(404, f"url: there is no {url[:80]!r}; there are {', '.join(PATHS)}", code="invalid_url")
            return 200, await self._answer(kind, body)
        except ApiError as error:
            return error.status, error.openai()
        except Exception as error:
            logger.error("a request failed: %r", error, exc_info=error)
            return 500, ApiError(500, "pace failed at this request").openai()

    async def _answer(self, kind: Generating, body: dict[str, Any]) -> dict[str, Any]:
        request, ignored = parse(kind.schema, body, kind.refused, kind.inert)
        self._name(ignored[:MOST_NAMED])
        if request.stream:
            raise ApiError(400, "stream: a batch's answers are whole ones; leave it out", param="stream")
        async with self._service.answer_request(kind, request) as (_, form, answer):
            return form.whole(await answer.whole(), answer.usage)

    def _name(self, ignored: list[str]) -> None:
        """Logs unknown fields, each once."""
        for name in ignored:
            if name not in self._ignored and len(self._ignored) < MOST_NAMED:
                self._ignored.add(name)
                logger.warning("the field %r is known to nobody, and ignored", name[:60])
