"""Endpoints for requests with a body. `ENDPOINTS` is the table of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.clients.notifiers import turn
from pace.llm.processors.transcription import check_transcribes
from pace.server.adapters.request import AdapterRequest
from pace.server.answers import Answer, Piece
from pace.server.body import LARGE, read_json
from pace.server.decisions.request import DecisionRequest
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.models.hosted import HostedModel
from pace.server.models.pool import ModelPool
from pace.server.network import http
from pace.server.network.access_log import Access
from pace.server.network.refusals import is_anthropic
from pace.server.prefixes.request import PrefixRequest
from pace.server.prompts import PromptReader
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.completions import CompletionsRequest
from pace.server.schemas.fields import Request, parse
from pace.server.schemas.messages import CountTokensRequest, MessagesRequest
from pace.server.schemas.responses import ResponsesRequest
from pace.server.schemas.tokens import DetokenizeRequest, TokenizeRequest
from pace.server.service import Service
from pace.server.transcriptions.answer import TranscriptionForm
from pace.server.transcriptions.forms import read_form
from pace.server.transcriptions.request import TranscriptionRequest
from pace.server.wire import tokens
from pace.server.wire.chat import ChatForm
from pace.server.wire.completions import CompletionsForm
from pace.server.wire.form import WireForm
from pace.server.wire.messages import MessagesForm
from pace.server.wire.openai import Envelope
from pace.server.wire.responses import ResponsesForm

logger = logging.getLogger("pace")


@dataclass(frozen=True)
class Endpoint:
    """ASGI application for one kind of POST request. Reads the body itself to avoid a second copy. Subclasses define
    `answer`."""

    paths: tuple[str, ...]
    """The first is documented, and names the endpoint in metrics."""
    schema: type[Request]
    content_types: ClassVar[tuple[str, ...]] = ("application/json",)
    """Types of its answers, for the OpenAPI document."""
    body_type: ClassVar[str] = "application/json"
    task: ClassVar[str | None] = None
    """The task of the models that it needs; None for any."""

    @property
    def is_anthropic(self) -> bool:
        """True if errors have Anthropic's form."""
        return is_anthropic(self.paths[0])

    def check(self, pool: ModelPool) -> None:
        """Raises ApiError if no request can be answered now, before any work is done for it."""

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        """Answers a parsed request, with `headers`. Raises ApiError."""
        raise NotImplementedError

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        pool: ModelPool = scope["app"].state.pool
        has_begun = False

        async def tracked(message: dict[str, Any]) -> None:
            nonlocal has_begun
            if not has_begun:
                pool.metrics.answered(self.paths[0], message["status"])
            has_begun = True
            await send(message)

        try:
            with pool.shared.large_bodies.one() as check:
                body = await http.read_body(scope, receive, pool.max_body_bytes, check, self.body_type)
                async with http.cancelled_when_gone(receive):
                    self.check(pool)
                    await turn()
                    read = functools.partial(self._read, pool, body, scope)
                    request, headers = await pool.shared.work(read) if len(body) > LARGE else read()
                    num_bytes = len(body)
                    del body, read
                    self._check_task(pool.find(request.model, self.task))
                    async with pool.use(request.model, self.task) as service:
                        if num_bytes > service.max_body_bytes:
                            raise ApiError(413, f"the body may have at most {service.max_body_bytes} bytes")
                        await service.fetch_images(request, lambda fetched: check(num_bytes + fetched))
                        await self.answer(service, request, headers, scope, tracked)
        except http.ClientGone:
            pool.metrics.client_gone()
        except Exception as error:
            if has_begun:  # the status line is sent: only closing the connection can report it
                raise
            await http.send_error(tracked, as_api_error(scope, error), self.is_anthropic)

    def _check_task(self, model: HostedModel) -> None:
        """Raises ApiError if the model is for another task."""
        if self.task not in (None, model.task):
            message = f"the model {model.names[0]!r} has no {self.paths[0]}: it {model.does}"
            raise ApiError(400, message, param="model", code="unsupported_endpoint")

    def _value(self, limits: Limits, body: bytes, scope: http.Scope) -> Any:
        """Returns the value of the body. Raises ApiError."""
        max_bytes = limits.body_bytes
        if len(body) > max_bytes and sum(map(body.count, (b",", b"[", b"{"))) > max_bytes // 2:
            # More values than a body of that size has: they take memory, which the text of an image does not.
            raise ApiError(413, f"the body may have at most {max_bytes} bytes besides images and sound")
        return read_json(body, limits.json_depth)

    def _read(self, pool: ModelPool, body: bytes, scope: http.Scope) -> tuple[Any, dict[str, str]]:
        """Returns the request, and headers that name its unknown fields."""
        value = self._value(pool.limits, body, scope)
        model = value.get("model", pool.names[0]) if isinstance(value, dict) else None
        Access.of(scope).model = model if isinstance(model, str) else None
        request, unknown = parse(self.schema, value)
        if unknown and pool.options.strict:
            raise ApiError(400, f"unknown field {unknown[0][:60]}", param=unknown[0][:60])
        return request, {"x-pace-ignored": ", ".join(map(_printable, unknown[:20]))} if unknown else {}


@dataclass(frozen=True)
class TokenizerEndpoint(Endpoint):
    """Endpoint answered by the tokenizer, in a worker."""

    function: Callable[[Any, PromptReader, Limits], dict[str, Any]]

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        service.check_model(request.model)
        service.check_ready()
        value = await service.work(self.function, request, service.reader, service.limits)
        await http.send_json(send, value, headers=headers)


@dataclass(frozen=True)
class AdapterEndpoint(Endpoint):
    """Endpoint that loads an adapter."""

    task = "generate"

    def _value(self, limits: Limits, body: bytes, scope: http.Scope) -> Any:
        value = super()._value(limits, body, scope)
        if isinstance(value, list):  # llama.cpp's form
            message = "the scale of an adapter is not set for everybody; send it with each request, as lora"
            raise ApiError(400, message, code="unsupported_parameter")
        return value

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        service.check_model(request.model)
        service.check_ready()
        request.check(service.limits)
        with scope["app"].state.pool.new_name(request.name):
            value = await service.work(service.adapters.load, request.name, request.path)
        await http.send_json(send, value, headers=headers)


@dataclass(frozen=True)
class PrefixEndpoint(Endpoint):
    """Endpoint that computes the beginning of prompts, and keeps it."""

    task = "generate"

    def check(self, pool: ModelPool) -> None:
        pool.check_room()

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        if service.check_model(request.model) in service.adapters.names:
            raise ApiError(400, "prefixes are kept for the model without adapters", param="model")
        request.check(service.limits)
        client = scope.get("pace") or {}
        value = await service.keep_prefix(request, client.get("salt"), client.get("key"))
        await http.send_json(send, value, headers=headers)


@dataclass(frozen=True)
class DecisionEndpoint(Endpoint):
    """Endpoint that answers questions about a state with probabilities."""

    task = "generate"

    def check(self, pool: ModelPool) -> None:
        pool.check_room()

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        model = service.check_model(request.model)
        client = scope.get("pace") or {}
        adapter = service.adapters.choice(model, None)
        value = await service.decide(request, client.get("salt"), client.get("key"), adapter)
        await http.send_json(send, {"model": model, **value}, headers=headers)


@dataclass(frozen=True)
class GenerationEndpoint(Endpoint):
    """Endpoint answered by the engine. Its schema has `to_job`."""

    form: Callable[[Any, Envelope, Any], WireForm]
    id_prefix: str
    content_types = ("application/json", "text/event-stream")
    task = "generate"

    def check(self, pool: ModelPool) -> None:
        pool.check_room()

    @asynccontextmanager
    async def generate(
        self, service: Service, request: Any, salt: str | None = None, key: str | None = None
    ) -> AsyncIterator[tuple[WireForm, Answer]]:
        """Yields the form of a request's answer, and the answer, which ends with the block. `salt` and `key` are the
        client's. Raises ApiError."""
        model = service.check_model(request.model)
        read = functools.partial(request.to_job, service.limits, service.loaded.defaults)
        job = await service.work(read) if service.takes_media else read()  # decoding base64 takes time
        async with service.answer(job, salt, key, service.adapters.choice(model, job.lora)) as answer:
            envelope = Envelope.new(self.id_prefix, model, service.fingerprint)
            yield self.form(request, envelope, service.loaded.tokenizer), answer

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        client = scope.get("pace") or {}
        async with self.generate(service, request, client.get("salt"), client.get("key")) as (form, answer):
            Access.of(scope).answer = answer
            if warnings := answer.prepared.warnings:
                headers["x-pace-warnings"] = "; ".join(_printable(warning, 200) for warning in warnings[:10])
            if request.stream:
                pieces = answer.pieces(http.KEEP_ALIVE_SECONDS)
                first = await anext(pieces)  # an immediate failure is a plain error
                await http.send_events(scope, send, _events(form, answer, first, pieces, scope), headers)
            else:
                choices = await answer.whole()
                await self.send_whole(send, request, form.whole(choices, answer.usage), headers)

    async def send_whole(self, send: http.Send, request: Any, value: dict[str, Any], headers: dict[str, str]) -> None:
        """Sends the answer of a request that is not streamed."""
        await http.send_json(send, value, headers=headers)


@dataclass(frozen=True)
class TranscriptionEndpoint(GenerationEndpoint):
    """Endpoint for the words of a clip, which is a file of a form."""

    content_types = ("application/json", "text/plain", "text/event-stream")
    body_type = "multipart/form-data"

    def _value(self, limits: Limits, body: bytes, scope: http.Scope) -> Any:
        return read_form(body, http.header(scope, b"content-type")).values("file")

    async def answer(
        self, service: Service, request: Any, headers: dict[str, str], scope: http.Scope, send: http.Send
    ) -> None:
        model = service.check_model(request.model)
        service.check_ready()
        try:
            check_transcribes(service.reader.encoder, f"the model {model!r}")
        except ValueError as error:
            raise ApiError(400, str(error), param="model") from None
        await super().answer(service, request, headers, scope, send)

    async def send_whole(self, send: http.Send, request: Any, value: dict[str, Any], headers: dict[str, str]) -> None:
        if request.response_format == "text":
            headers = {"content-type": "text/plain; charset=utf-8", **headers}
            return await http.send_bytes(send, f"{value['text']}\n".encode(), headers=headers)
        await super().send_whole(send, request, value, headers)


async def _events(
    form: WireForm, answer: Answer, first: list[Piece], pieces: AsyncIterator[list[Piece]], scope: http.Scope
) -> AsyncIterator[bytes]:
    """Yields the events of a stream: those of the `first` pieces, then of the others. An error is one of them."""
    yield form.begin(answer.usage)
    fresh: list[Piece] | None = first
    try:
        while fresh is not None:
            usage = answer.usage
            yield b"".join(form.piece(piece, usage) for piece in fresh) or http.KEEP_ALIVE
            fresh = await anext(pieces, None)
    except Exception as error:
        yield form.error(as_api_error(scope, error))
        return
    yield form.end(answer.usage)


def as_api_error(scope: http.Scope, error: Exception) -> ApiError:
    """Returns the error that a client gets. The log has the details of an internal failure."""
    if isinstance(error, ApiError):
        return error
    request_id = (scope.get("pace") or {}).get("request_id", "")
    logger.error("request %s failed: %r", request_id, error, exc_info=error)
    return ApiError(500, "the server failed at this request", headers={"x-should-retry": "false"})


def _printable(name: str, most: int = 60) -> str:
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in name[:most])


ENDPOINTS: tuple[Endpoint, ...] = (
    GenerationEndpoint(("/v1/chat/completions", "/chat/completions"), ChatRequest, ChatForm, "chatcmpl-"),
    GenerationEndpoint(("/v1/completions", "/completions"), CompletionsRequest, CompletionsForm, "cmpl-"),
    GenerationEndpoint(("/v1/responses", "/responses"), ResponsesRequest, ResponsesForm, "resp_"),
    GenerationEndpoint(("/v1/messages", "/messages"), MessagesRequest, MessagesForm, "msg_"),
    TranscriptionEndpoint(
        ("/v1/audio/transcriptions", "/audio/transcriptions"), TranscriptionRequest, TranscriptionForm, "trsc-"
    ),
    DecisionEndpoint(("/v1/systemone", "/systemone"), DecisionRequest),
    AdapterEndpoint(("/lora-adapters", "/v1/lora-adapters"), AdapterRequest),
    PrefixEndpoint(("/prefixes", "/v1/prefixes"), PrefixRequest),
    TokenizerEndpoint(("/tokenize", "/v1/tokenize"), TokenizeRequest, tokens.tokenize),
    TokenizerEndpoint(("/detokenize", "/v1/detokenize"), DetokenizeRequest, tokens.detokenize),
    TokenizerEndpoint(("/apply-template",), ChatRequest, tokens.apply_template),
    TokenizerEndpoint(
        ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"), ChatRequest, tokens.count
    ),
    TokenizerEndpoint(
        ("/v1/responses/input_tokens", "/responses/input_tokens"), ResponsesRequest, tokens.count_response
    ),
    TokenizerEndpoint(("/v1/messages/count_tokens", "/messages/count_tokens"), CountTokensRequest, tokens.count),
)
