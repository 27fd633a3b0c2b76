"""Kinds of request with a body: their paths, fields and forms of answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pace.server.limits import Limits
from pace.server.prompts import PromptReader
from pace.server.schemas import chat, completions, messages, responses, tokens
from pace.server.schemas.fields import Request
from pace.server.wire import tokens as about_tokens
from pace.server.wire.chat import ChatForm
from pace.server.wire.completions import CompletionsForm
from pace.server.wire.form import WireForm
from pace.server.wire.messages import MessagesForm
from pace.server.wire.openai import Envelope
from pace.server.wire.responses import ResponsesForm


@dataclass(frozen=True)
class Kind:
    """One kind of request: its paths (the first is documented) and its fields."""

    paths: tuple[str, ...]
    schema: type[Request]
    refused: dict[str, str]
    inert: frozenset[str] = frozenset()
    is_anthropic: bool = False

    @property
    def name(self) -> str:
        """Name of the kind in metrics."""
        return self.paths[0]


@dataclass(frozen=True)
class Generating(Kind):
    """Kind answered by the engine. Its schema has `to_job`."""

    form: Callable[[Any, Envelope, Any], WireForm] = None
    id_prefix: str = ""


@dataclass(frozen=True)
class Asking(Kind):
    """Kind answered by the tokenizer, in a worker."""

    answer: Callable[[Any, PromptReader, Limits], dict[str, Any]] = None


def _count(member: str, **more: str) -> Callable[[Any, PromptReader, Limits], dict[str, Any]]:
    """Returns a function that answers with the number of tokens of a conversation's prompt."""

    def answer(request: Any, reader: PromptReader, limits: Limits) -> dict[str, Any]:
        return {**more, member: len(reader.encode_chat(request.to_prompt(limits)))}

    return answer


GENERATING = (
    Generating(
        ("/v1/chat/completions", "/chat/completions"),
        chat.ChatRequest,
        chat.CHAT_REFUSED,
        chat.CHAT_INERT,
        form=ChatForm,
        id_prefix="chatcmpl-",
    ),
    Generating(
        ("/v1/completions", "/completions"),
        completions.CompletionsRequest,
        completions.COMPLETIONS_REFUSED,
        completions.COMPLETIONS_INERT,
        form=CompletionsForm,
        id_prefix="cmpl-",
    ),
    Generating(
        ("/v1/responses", "/responses"),
        responses.ResponsesRequest,
        responses.RESPONSES_REFUSED,
        responses.RESPONSES_INERT,
        form=ResponsesForm,
        id_prefix="resp_",
    ),
    Generating(
        ("/v1/messages", "/messages"),
        messages.MessagesRequest,
        messages.MESSAGES_REFUSED,
        messages.MESSAGES_INERT,
        is_anthropic=True,
        form=MessagesForm,
        id_prefix="msg_",
    ),
)

ASKING = (
    Asking(
        ("/tokenize", "/v1/tokenize"),
        tokens.TokenizeRequest,
        tokens.TOKENS_REFUSED,
        answer=about_tokens.tokenize,
    ),
    Asking(("/detokenize", "/v1/detokenize"), tokens.DetokenizeRequest, {}, answer=about_tokens.detokenize),
    Asking(
        ("/apply-template",), chat.ChatRequest, chat.CHAT_REFUSED, chat.CHAT_INERT, answer=about_tokens.apply_template
    ),
    Asking(
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"),
        chat.ChatRequest,
        chat.CHAT_REFUSED,
        chat.CHAT_INERT,
        answer=_count("input_tokens"),
    ),
    Asking(
        ("/v1/responses/input_tokens", "/responses/input_tokens"),
        responses.ResponsesRequest,
        responses.RESPONSES_REFUSED,
        responses.RESPONSES_INERT,
        answer=_count("input_tokens", object="response.input_tokens"),
    ),
    Asking(
        ("/v1/messages/count_tokens", "/messages/count_tokens"),
        messages.CountTokensRequest,
        messages.MESSAGES_REFUSED,
        messages.MESSAGES_INERT,
        is_anthropic=True,
        answer=_count("input_tokens"),
    ),
)
