"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: Anthropic's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pace.grammar import Grammar, GrammarLimits
from pace.grammar.response_format import read_response_format
from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError, invalid
from pace.server.jobs import ChatPrompt, GenerationJob, Structure
from pace.server.limits import Limits
from pace.server.schemas.blocks import Choice, Turn, check_tools, for_openai, read_turns, system_text
from pace.server.schemas.fields import Bounded, Request, Strings, check_count, check_salt
from pace.server.schemas.generation import MEDIA_OPTIONS
from pace.server.schemas.passed_over import ANTHROPIC_TOOLS, PassedOver
from pace.server.schemas.sampling import Settings
from pace.server.schemas.turns import Nested, with_system

BETWEEN_SYSTEM = "\n"
"""Separator that Anthropic puts between the texts of a system prompt. Source: platform.claude.com, OpenAI SDK
compatibility."""


BUDGET = "thinking.budget_tokens"


class Thinking(Nested):
    """Option to enable thoughts in the chat template."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    """The thinking budget of thoughts that are enabled."""


class OutputConfig(Nested):
    """Output options; `effort` is passed to the chat template."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class CountTokensRequest(Request):
    """The prompt of a request."""

    UNSUPPORTED = {
        "mcp_servers": "only the client's own tools are supported",
        "container": "containers are not supported",
        "mm_processor_kwargs": MEDIA_OPTIONS,
    }
    UNUSED = frozenset(
        "cache_control diagnostics inference_geo metadata service_tier speed user_profile_id workspace_id".split()
    )
    """Prompts are reused without `cache_control`."""

    messages: Annotated[list[Turn], Bounded]
    system: Any = None
    thinking: Thinking | None = None
    tools: Annotated[list[Any], Bounded] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    context_management: Any = None
    """Ignored: conversations are not edited here."""

    def to_prompt(self, limits: Limits) -> ChatPrompt:
        """Returns the system prompt and the turns, for the chat template. If the last turn is the assistant's, the
        answer continues it. Raises ApiError for unsupported requests."""
        passed = PassedOver()
        tools = passed.tools(self.tools, ANTHROPIC_TOOLS)
        check_tools(tools)
        passed.field("context_management", self.context_management)
        check_count("messages", self.messages, limits.messages)
        system = system_text(self.system, "system", limits, BETWEEN_SYSTEM)
        turns = read_turns(self.messages, limits, passed)
        if not turns:
            raise invalid("messages", "must contain text, images, tool calls or tool results")
        if turns[-1] == {"role": "assistant", "content": ""}:
            turns.pop()  # an empty turn, which the answer would not continue
        goes_on = bool(turns) and turns[-1]["role"] == "assistant"
        if goes_on and turns[-1].get("tool_calls"):
            raise ApiError(
                400, "messages: tool calls must be followed by their results, in a turn of the user", param="messages"
            )
        return ChatPrompt(
            with_system(system, turns, BETWEEN_SYSTEM),
            not goes_on,
            goes_on,
            self._template_kwargs(),
            tools=for_openai(tools),
            tool_choice=self.tool_choice and self.tool_choice.for_openai(_names(self.tools) - _names(tools)),
            parallel_calls=not (self.tool_choice and self.tool_choice.disable_parallel_tool_use),
            passed_over=passed.names,
        )

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        if self.thinking:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config and self.output_config.effort:
            kwargs["reasoning_effort"] = self.output_config.effort
        return kwargs


class MessagesRequest(CountTokensRequest):
    """A prompt, and the options for answering it."""

    max_tokens: int = Field(ge=1)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    stop_sequences: Strings | None = None
    stream: bool | None = None

    seed: int | None = None
    """The fields from here on are not Anthropic's."""
    cache_salt: str | None = None

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> GenerationJob:
        """Returns the job of the request. `defaults` are the checkpoint's. Raises ApiError for unsupported requests."""
        check_salt(self.cache_salt, limits)
        settings = Settings(limits, defaults)
        settings.draws(self)
        settings.seed(self.seed)
        settings.stop(self.stop_sequences, "stop_sequences")
        if self.thinking and self.thinking.type == "enabled":
            settings.thinking_budget({BUDGET: self.thinking.budget_tokens})
        return GenerationJob(
            self.to_prompt(limits),
            settings.config,
            self.max_tokens,
            stream=bool(self.stream),
            cache_salt=self.cache_salt,
            structure=self._structure(),
            budget_param=settings.budget_param,
            needs_thoughts=False,
        )

    def _structure(self) -> Structure | None:
        form = self.output_config and self.output_config.format
        return None if form is None else Structure("output_config.format", form, _read_output_format)


def _names(tools: list[Any] | None) -> set[str]:
    names = [tool.get("name") for tool in tools or () if isinstance(tool, dict)]
    return {name for name in names if isinstance(name, str)}


def _read_output_format(form: dict[str, Any], limits: GrammarLimits, whitespace: str) -> Grammar | None:
    """Returns the grammar of an output format. Anthropic has only JSON schemas, which are always fully enforced."""
    if form.get("type") != "json_schema":
        raise ValueError(f"type must be json_schema, got {form.get('type')!r:.100}")
    return read_response_format({**form, "strict": True}, limits, whitespace)
