"""`POST /v1/responses`: self-contained requests. Nothing is stored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from pace.grammar.response_format import read_response_format
from pace.llm.configs import SamplingConfig
from pace.server.errors import invalid, unsupported
from pace.server.jobs import ChatPrompt, GenerationJob, Structure
from pace.server.limits import Limits
from pace.server.schemas.fields import Bounded, Request, Strings, check_count, check_salt
from pace.server.schemas.generation import MEDIA_OPTIONS
from pace.server.schemas.items import NOT_STORED, Item, read_items
from pace.server.schemas.passed_over import OPENAI_TOOLS, PassedOver, without_tools
from pace.server.schemas.sampling import Settings
from pace.server.schemas.turns import Nested, Reasoning, budgets_of, thinking_variables, with_system

LOGPROBS = "message.output_text.logprobs"
"""The only value of `include` with an effect here; the others concern OpenAI's tools."""


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input", "must be a string or a list of items")


_INPUT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class TextConfig(Nested):
    """Options of the text; `verbosity` has no effect."""

    format: dict[str, Any] | None = None


class ResponsesRequest(Request):
    """The body of `POST /v1/responses`, and of `POST /v1/responses/input_tokens`."""

    UNSUPPORTED = {
        "previous_response_id": NOT_STORED,
        "conversation": NOT_STORED,
        "background": "an answer ends with its connection; use stream",
        "prompt": "prompts are not stored here; send instructions and input",
        "context_management": "conversations are not compacted",
        "moderation": "moderation is not supported",
        "mm_processor_kwargs": MEDIA_OPTIONS,
    }
    UNUSED = frozenset(
        "access_programs background_options client_metadata image max_tool_calls prompt_cache_key "
        "prompt_cache_retention safety_identifier user".split()
    )
    """`max_tool_calls` counts calls of OpenAI's own tools."""

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
    """Accepted; the answer has false."""
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: str | None = None
    tools: Annotated[list[Any], Bounded] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_options: dict[str, Any] | None = None

    top_k: int | None = Field(None, ge=-1)
    """The fields from here on are not OpenAI's."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    stop: str | Strings | None = None
    cache_salt: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> GenerationJob:
        """Returns the job of the request. `defaults` are the checkpoint's. Raises ApiError for unsupported requests."""
        self._check_served()
        check_salt(self.cache_salt, limits)
        settings = Settings(limits, defaults)
        settings.draws(self)
        settings.seed(self.seed)
        settings.stop(self.stop)
        settings.thinking_budget(budgets_of(self.reasoning))
        if self.wants_logprobs:
            settings.logprobs(self.top_logprobs or 0, "top_logprobs")
        structure = None
        if self.text and self.text.format is not None:
            structure = Structure("text.format", self.text.format, read_response_format)
        return GenerationJob(
            self.to_prompt(limits),
            settings.config,
            self.max_output_tokens,
            stream=bool(self.stream),
            cache_salt=self.cache_salt,
            wants_tokens=self.wants_logprobs,
            structure=structure,
            budget_param=settings.budget_param,
        )

    def to_prompt(self, limits: Limits) -> ChatPrompt:
        """Returns the instructions and the input, for the chat template. Raises ApiError."""
        check_count("input", self.input, limits.messages)
        passed = PassedOver()
        messages = read_items(self.input, limits, passed)
        if not messages:
            raise invalid("input", "must contain a message")
        options = self.reasoning or Reasoning()
        return ChatPrompt(
            with_system(self.instructions, messages),
            template_kwargs=thinking_variables(options.effort, options.enabled),
            param="input",
            tools=passed.tools(self.tools, OPENAI_TOOLS),
            tool_choice=without_tools(self.tool_choice, OPENAI_TOOLS),
            parallel_calls=self.parallel_tool_calls is not False,
            passed_over=passed.names,
        )

    def _check_served(self) -> None:
        """Raises ApiError for unsupported values of supported fields."""
        if self.tools and self.wants_logprobs:
            param = "top_logprobs" if self.top_logprobs else "include"
            raise unsupported(param, "log-probabilities are not supported with tools; use chat completions")
        if self.truncation == "auto":
            raise unsupported("truncation", "conversations are not truncated; send one that fits the context")
        if self.service_tier not in (None, "auto", "default"):
            raise unsupported("service_tier", "only auto and default are supported")
        if (self.prompt_cache_options or {}).get("prewarm"):
            raise unsupported("prompt_cache_options.prewarm", "not supported; send max_output_tokens: 1 instead")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream: true")
