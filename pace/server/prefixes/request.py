"""`POST /prefixes`: computes the beginning of prompts, and keeps it under a name."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from pace.server.errors import ApiError, invalid
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

    def tokens(self, reader: PromptReader, limits: Limits) -> list[int]:
        """Returns the tokens with which all prompts begin that continue this one. Run in a worker. Raises ApiError."""
        if self.prompt is not None:
            return reader.encode(self.prompt, self.add_special_tokens is not False)
        one, other = (self._chat_tokens(ending, reader, limits) for ending in ENDINGS)
        return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]

    def _chat_tokens(self, ending: str, reader: PromptReader, limits: Limits) -> list[int]:
        """Returns the tokens of the conversation, with `ending` as the end of its last question, or as the next."""
        *before, last = self.messages or [None]
        content = last.get("content") if isinstance(last, dict) and last.get("role") == "user" else None
        if content is None:
            messages = [*(self.messages or ()), {"role": "user", "content": ending}]
        elif isinstance(content, str):
            messages = [*before, {**last, "content": content + ending}]
        else:
            raise invalid("messages", "must end with a text, if the last one is of the user: media are not kept")
        chat = ChatRequest(
            messages=messages,
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_special_tokens=self.add_special_tokens,
        )
        prompt = chat.to_prompt(limits)
        if reader.plan(prompt).media:
            raise invalid("messages", "may not have images and sound: they are not kept")
        return reader.encode_chat(prompt)
