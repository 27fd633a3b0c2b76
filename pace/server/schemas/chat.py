"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from pace.llm.configs import SamplingConfig
from pace.server.errors import invalid, unsupported
from pace.server.jobs import ChatPrompt, GenerationJob
from pace.server.limits import Limits
from pace.server.schemas.description import CONTENT
from pace.server.schemas.fields import Bounded, Strings, check_count, check_range
from pace.server.schemas.generation import MAX_TOKENS, GenerationRequest
from pace.server.schemas.media import RequestMedia
from pace.server.schemas.passed_over import OPENAI_TOOLS, PassedOver, without_tools
from pace.server.schemas.turns import THOUGHT, Reasoning, budgets_of, thinking_variables

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED = frozenset("messages tools documents add_generation_prompt continue_final_message tokenize chat_template "
                     "return_dict return_tensors padding truncation max_length conversation conversations self "
                     "tokenizer_kwargs return_assistant_tokens_mask".split())  # fmt: skip
"""Template variables that the server sets."""


_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": {"enum": list(ROLES)}, "content": CONTENT},
    },
}


class ChatRequest(GenerationRequest):
    UNSUPPORTED = GenerationRequest.UNSUPPORTED | {
        "functions": "replaced by tools: send tools and tool_choice",
        "audio": "this model generates text only",
        "prediction": "predicted outputs are not supported",
        "web_search_options": "web search is not supported",
        "chat_template": "templates from clients are not run; chat_template_kwargs sets variables of the model's own",
        "documents": "documents for the template are not supported",
        "echo": "only /v1/completions supports it",
    }
    UNUSED = GenerationRequest.UNUSED | {"function_call", "include_reasoning"}

    messages: Annotated[list[Any], WithJsonSchema(_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Annotated[list[Any], Bounded] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    modalities: Strings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """Passed to the template; some templates use it. "none" turns reasoning off."""
    reasoning: Reasoning | None = None
    """OpenRouter's options."""
    enable_thinking: bool | None = None
    """Passed to the template."""

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> GenerationJob:
        """Returns the job of the request. Raises ApiError for unsupported requests."""
        if self.modalities not in (None, ["text"], []):
            raise unsupported("modalities", "this model generates text only")
        settings = self.settings(limits, defaults, is_chat=True, budgets=budgets_of(self.reasoning))
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs: true")
        if self.logprobs:
            settings.logprobs(self.top_logprobs or 0, "top_logprobs")
        max_tokens, param = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None:
            max_tokens, param = self.max_completion_tokens, "max_completion_tokens"
        check_range(param, max_tokens, 1, MAX_TOKENS)
        return self.job(self.to_prompt(limits), settings, max_tokens, param)

    def to_prompt(self, limits: Limits) -> ChatPrompt:
        """Returns the messages, for the chat template. Raises ApiError for invalid messages."""
        check_count("messages", self.messages, limits.messages)
        passed = PassedOver()
        items = _without_custom_calls(self.messages, passed)
        media = RequestMedia(limits)
        messages = [_message(item, f"messages[{index}]", limits, media) for index, item in items]
        goes_on = bool(self.continue_final_message)
        if goes_on and self.add_generation_prompt:
            raise invalid(
                "continue_final_message",
                "continues the last message, and add_generation_prompt begins a new one; set only one",
            )
        if goes_on and messages[-1]["role"] != "assistant":
            raise invalid("continue_final_message", "needs a last message of the assistant")
        begins = not goes_on if self.add_generation_prompt is None else self.add_generation_prompt
        kwargs = _template_kwargs(self._thinking_variables() | (self.chat_template_kwargs or {}), limits)
        return ChatPrompt(
            messages,
            begins,
            goes_on,
            kwargs,
            bool(self.add_special_tokens),
            tools=passed.tools(self.tools, OPENAI_TOOLS),
            tool_choice=without_tools(self.tool_choice, OPENAI_TOOLS),
            parallel_calls=self.parallel_tool_calls is not False,
            passed_over=passed.names,
        )

    def _thinking_variables(self) -> dict[str, Any]:
        options = self.reasoning or Reasoning()
        enabled = options.enabled if self.enable_thinking is None else self.enable_thinking
        return thinking_variables(self.reasoning_effort or options.effort, enabled)


def _without_custom_calls(items: list[Any], passed: PassedOver) -> list[tuple[int, Any]]:
    """Returns the messages with their indices, without calls of custom tools and their results."""
    kept: list[tuple[int, Any]] = []
    gone: set[Any] = set()
    for index, item in enumerate(items):
        calls = item.get("tool_calls") if isinstance(item, dict) else None
        if isinstance(calls, list):
            custom = [
                call
                for call in calls
                if isinstance(call, dict) and passed.is_passed("calls", call.get("type"), ("custom",))
            ]
            gone |= {call["id"] for call in custom if isinstance(call.get("id"), str)}
            if custom:
                item = {**item, "tool_calls": [call for call in calls if call not in custom]}
                if not item["tool_calls"] and not item.get("content"):
                    continue
        elif isinstance(item, dict) and item.get("role") == "tool" and item.get("tool_call_id") in gone:
            continue
        kept.append((index, item))
    return kept


def _message(item: Any, place: str, limits: Limits, media: RequestMedia) -> dict[str, Any]:
    """Returns a message in the template's terms."""
    if not isinstance(item, dict):
        raise invalid(place, "must be an object with role and content")
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{place}.role", f"must be one of {', '.join(ROLES)}; got {role!r:.60}")
    if item.get("function_call"):
        raise unsupported(f"{place}.function_call", "replaced by tool_calls")
    if item.get("audio"):
        raise unsupported(f"{place}.audio", "an answer in sound is not stored here; send its text as content")
    if item.get("content") is None and role != "assistant":
        raise invalid(f"{place}.content", "is missing")
    message = {
        "role": "system" if role == "developer" else role,
        "content": media.content(item.get("content"), f"{place}.content", role in ("user", "tool")),
    }
    if (calls := item.get("tool_calls")) and role == "assistant":
        message["tool_calls"] = _tool_calls(calls, f"{place}.tool_calls", limits)
    for name in ("name", "tool_call_id", "reasoning", THOUGHT):
        if (value := item.get(name)) is not None:
            if not isinstance(value, str):
                raise invalid(f"{place}.{name}", "must be a string")
            message[name] = value
    if thought := message.pop("reasoning", None):  # vLLM's name
        message.setdefault(THOUGHT, thought)
    return message


def _tool_calls(calls: Any, place: str, limits: Limits) -> list[dict[str, Any]]:
    """Returns the calls of an earlier answer. Raises ApiError for invalid ones."""
    if not isinstance(calls, list) or len(calls) > limits.tools:
        raise invalid(place, f"must be a list of at most {limits.tools} calls")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not named or not isinstance(call.get("id", ""), str):
            message = "must have an id, and a function with a name and arguments"
            raise invalid(f"{place}[{index}]", f"{message}")
    return calls


def _template_kwargs(kwargs: dict[str, Any], limits: Limits) -> dict[str, Any]:
    if len(kwargs) > limits.template_kwargs:
        raise invalid("chat_template_kwargs", f"may have {limits.template_kwargs} entries")
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name[:60]}"
        if name in RESERVED or name.startswith("_"):
            raise invalid(param, "is reserved for the server")
        if not isinstance(value, (str, int, float, bool, type(None))):
            raise invalid(param, "must be a string, a number, true, false or null")
    return kwargs
