"""`POST /v1/responses`: requests that stand for themselves. Nothing is stored, and only text comes out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pace.grammar.response_format import read_response_format
from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError, refused
from pace.server.jobs import ChatPrompt, Job
from pace.server.limits import Limits
from pace.server.schemas.fields import Bounded, Request, Strings
from pace.server.schemas.generation import joined_text
from pace.server.schemas.sampling import Settings
from pace.server.schemas.structure import Structure
from pace.server.schemas.turns import NOT_YET, Nested, check_count, check_salt, with_system

_NOT_STORED = "responses are not stored here; send the whole conversation as input"

RESPONSES_REFUSED = {
    "tools": NOT_YET,
    "previous_response_id": _NOT_STORED,
    "conversation": _NOT_STORED,
    "background": "an answer lives as long as its connection; use stream",
    "prompt": "no prompts are stored here; send instructions and input",
    "context_management": "conversations are not compacted",
    "moderation": "there is no moderation here",
}

RESPONSES_INERT = frozenset(
    "access_programs background_options image max_tool_calls prompt_cache_key prompt_cache_retention "
    "safety_identifier user".split()
)
"""Fields without effect on a text that one machine writes without tools."""

LOGPROBS = "message.output_text.logprobs"
"""The one value of `include` that adds something here; the others are about tools."""

_CALLS = frozenset(("function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"))


class Item(Nested):
    """One item of the input. An item without a type is a message."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Any = None


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input", "must be a string or a list of items")


_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class TextConfig(Nested):
    """How the text should be; `verbosity` changes nothing."""

    format: dict[str, Any] | None = None


class Reasoning(Nested):
    """`effort` is for the chat template. Without reasoning in the output there is nothing to summarise."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesRequest(Request):
    """The body of `POST /v1/responses`, and of `POST /v1/responses/input_tokens`."""

    model: str | None = None
    input: Annotated[list[Item], BeforeValidator(_as_items), Bounded, WithJsonSchema(_INPUT)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = None
    include: Strings | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], Bounded] | None = None
    store: bool | None = None
    """Accepted, and answered with false."""
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None

    top_k: int | None = Field(None, ge=-1)
    """From here on: what OpenAI does not have."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: str | Strings | None = None
    cache_salt: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> Job:
        """What is wanted. `defaults` are the checkpoint's. Raises ApiError for what cannot be served."""
        self._check_served()
        check_salt(self.cache_salt, limits)
        settings = Settings(limits, defaults)
        settings.temperature(self.temperature)
        settings.set("top_p", self.top_p)
        settings.top_k(self.top_k)
        settings.set("min_p", self.min_p)
        settings.seed(self.seed)
        settings.stop(self.stop)
        if self.wants_logprobs:
            settings.logprobs(self.top_logprobs or 0, "top_logprobs")
        structure = None
        if self.text and self.text.format is not None:
            structure = Structure("text.format", self.text.format, read_response_format)
        return Job(
            self.to_prompt(limits),
            settings.config,
            self.max_output_tokens,
            stream=bool(self.stream),
            cache_salt=self.cache_salt,
            wants_tokens=self.wants_logprobs,
            structure=structure,
        )

    def to_prompt(self, limits: Limits) -> ChatPrompt:
        """The instructions and the input, for the chat template. Raises ApiError."""
        check_count("input", self.input, limits.messages)
        items = ((item, f"input[{i}]") for i, item in enumerate(self.input))
        messages = [_message(item, place, limits) for item, place in items if item.type != "reasoning"]
        if not messages:
            raise ApiError(400, "input must hold a message", param="input")
        effort = self.reasoning.effort if self.reasoning else None
        kwargs: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        if effort == "none":
            kwargs["enable_thinking"] = False
        return ChatPrompt(with_system(self.instructions, messages), template_kwargs=kwargs, param="input")

    def _check_served(self) -> None:
        """Raises for values that are known and not served, of fields that are."""
        if self.tool_choice not in (None, "none", "auto"):
            raise refused("tool_choice", f'{NOT_YET}, other than "none" and "auto"')
        if self.truncation == "auto":
            raise refused("truncation", "nothing is dropped from a conversation; send what fits the context")
        if self.service_tier not in (None, "auto", "default"):
            raise refused("service_tier", "there is one tier; leave it out, or say auto or default")
        if (self.prompt_cache_options or {}).get("prewarm"):
            raise refused("prompt_cache_options.prewarm", "every request is answered; ask for max_output_tokens: 1")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def _message(item: Item, place: str, limits: Limits) -> dict[str, Any]:
    """An item in the template's terms."""
    if item.type in _CALLS:
        raise refused(place, f"{item.type} is {NOT_YET}")
    if item.type == "item_reference":
        raise refused(place, f"{_NOT_STORED}, not references")
    if item.type != "message":
        raise refused(place, f"only messages are served, got an item of type {item.type[:40]!r}")
    for name in ("role", "content"):
        if getattr(item, name) is None:
            raise ApiError(400, f"{place}.{name} is missing", param=f"{place}.{name}")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": joined_text(item.content, f"{place}.content", limits.parts)}
