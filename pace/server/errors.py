"""Errors of requests, in the forms that clients read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}
"""OpenAI's `type` of a status, if the error names none."""

ANTHROPIC_TYPES = {**TYPES, 429: "rate_limit_error", 500: "api_error", 501: "api_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An error to answer with. The message is for the client: it contains no path and nothing of other requests."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str | None = None,
        headers: dict[str, str] | None = None,
        **details: Any,
    ) -> None:
        """`param` names the wrong field; `details` are further members of the error object."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type or TYPES.get(status, "invalid_request_error")
        self.headers = dict(headers or {})
        self.details = details

    def openai(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
                **self.details,
            }
        }

    def anthropic(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class NotWell(ApiError):
    """Error of `/health`, with status 503. Next to the error it has the `status` that scripts read."""

    def __init__(self, state: str, why: str) -> None:
        """`state` is "loading" if waiting helps, else "failed" or "unwell"."""
        super().__init__(503, why, headers={"retry-after": "5"} if state == "loading" else None)
        self.state = state

    def openai(self) -> dict[str, Any]:
        return {"status": self.state, **super().openai()}


LOADING = "the model is loading"


def invalid(param: str, problem: str) -> ApiError:
    """Returns the error for a field with an invalid value. `problem` follows its name."""
    return ApiError(400, f"{param} {problem}", param=param)


def unsupported(param: str, why: str) -> ApiError:
    """Returns the error for a known field that is not supported."""
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def not_served(name: str, names: Iterable[str]) -> ApiError:
    """Returns the error for a model that is none of `names`."""
    message = f"the model {name!r} is not served here; available: {', '.join(names)}"
    return ApiError(404, message, param="model", code="model_not_found")
