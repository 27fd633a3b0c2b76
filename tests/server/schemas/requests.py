"""Requests read as the endpoints read them, for tests of schemas."""

from __future__ import annotations

from typing import Any

import pytest

from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError
from pace.server.jobs import GenerationJob
from pace.server.limits import Limits

pytest.importorskip("pydantic")
from pace.server.schemas.fields import Request, parse


def read(schema: type[Request], body: Any) -> Any:
    """A request, all of whose fields are known."""
    request, unknown = parse(schema, body)
    assert unknown == []
    return request


def job_of(
    schema: type[Request], body: Any, defaults: SamplingConfig | None = None, limits: Limits | None = None
) -> GenerationJob:
    return read(schema, body).to_job(limits or Limits(), defaults or SamplingConfig())


def refusal_of(schema: type[Request], body: Any, limits: Limits | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        job_of(schema, body, limits=limits)
    assert caught.value.status == 400
    return caught.value
