"""`POST /tokenize` and `POST /detokenize`, as in vLLM, also with llama.cpp's names."""

from __future__ import annotations

from typing import Any

from pace.server.errors import ApiError
from pace.server.jobs import ChatPrompt
from pace.server.limits import Limits
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.fields import Integers, Request


class TokenizeRequest(Request):
    """Requires exactly one of `prompt`, `content` (llama.cpp's name for it) and `messages`."""

    UNSUPPORTED = {"chat_template": ChatRequest.UNSUPPORTED["chat_template"]}

    prompt: str | None = None
    content: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool | None = None
    """Default as in vLLM and llama.cpp: true for `prompt`, false for the others."""
    add_special: bool | None = None
    """llama.cpp's name for `add_special_tokens`."""
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    """llama.cpp's option: tokens as objects, with their texts."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    """Tools for the template, in addition to `messages`."""

    def input(self, limits: Limits) -> str | ChatPrompt:
        """Returns the text or conversation to tokenise. Raises ApiError."""
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            names = ", ".join(given) or "none"
            raise ApiError(
                400, f"give exactly one of prompt, content and messages; got {names}", param=(given or ["prompt"])[-1]
            )
        if self.messages is None:
            return self.content if self.prompt is None else self.prompt
        chat = ChatRequest(
            messages=self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )
        return chat.to_prompt(limits)

    @property
    def adds_special_tokens(self) -> bool:
        for asked in (self.add_special_tokens, self.add_special):
            if asked is not None:
                return asked
        return self.prompt is not None


class DetokenizeRequest(Request):
    tokens: Integers
