"""`POST /prefixes`: computes the beginning of prompts, and keeps it under a name."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from pace.llm.processors.prompts import Prompt
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.prefixes.names import check_name
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.fields import Request, check_salt

ENDINGS = ("0", "x")
"""Two ends of a message. What prompts with both of them begin with is the same for any end."""


class PrefixRequest(Request):
    """Requires `name`, and exactly one of `prompt` and `messages`."""

    name: str
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None

    def check(self, limits: Limits) -> None:
        """Raises ApiError for fields that are wrong without a look at the model."""
        check_name(self.name)
        check_salt(self.cache_salt, limits)
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "give exactly one of prompt and messages", param="messages")

    def read(self, reader: PromptReader, limits: Limits) -> Prompt:
        """Returns the tokens with which all prompts begin that continue this one, and the media among them. Run in a
        worker. Raises ApiError."""
        if self.prompt is not None:
            return Prompt(reader.encode(self.prompt, self.add_special_tokens is not False))
        one, other = (self._conversation(ending, reader, limits) for ending in ENDINGS)
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one.tokens, other.tokens))
        return one.beginning(len(list(pairs)))

    def _conversation(self, ending: str, reader: PromptReader, limits: Limits) -> Prompt:
        """Returns the conversation, with `ending` as the end of its last question, or as the next."""
        *before, last = self.messages or [None]
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
        if content is None:
            messages = [*(self.messages or ()), {"role": "user", "content": ending}]
        else:
            messages = [*before, {**last, "content": _extended(content, ending)}]
        chat = ChatRequest(
            messages=messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=self.add_special_tokens,
        )
        return reader.read_chat(chat.to_prompt(limits))


def _extended(content: Any, ending: str) -> Any:
    """The content of a message with more text at its end. What is no content is left to the reader of messages."""
    if isinstance(content, str):
        return content + ending
    if not isinstance(content, list):
        return content
    last = content[-1] if content else None
    if isinstance(last, dict) and isinstance(last.get("text"), str):
        return [*content[:-1], {**last, "text": last["text"] + ending}]
    return [*content, {"type": "text", "text": ending}]
