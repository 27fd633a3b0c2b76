"""Our messages as Anthropic's own client reads them, streamed and whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("anthropic")
import anthropic
from anthropic import types
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.server.answers import Finish, Piece
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.schemas.messages import CountTokensRequest, MessagesRequest
from pace.server.wire.form import dumps
from pace.server.wire.messages import MessagesForm
from pace.server.wire.openai import Envelope
from tests.server.schemas.requests import job_of, read
from tests.server.wire.scripted import answer, cut, events, serving, stream, usage, whole

TEXT = "Grüße,\n🦊 “quoted” \u2029 \\ and more"
ASKED = {"model": "tiny", "max_tokens": 64, "messages": [{"role": "user", "content": "hi"}]}
END = Finish("stop")
FINISHES = [
    (END, "end_turn", None),
    (Finish("stop", 17, is_end_token=True), "end_turn", None),
    (Finish("stop", "###"), "stop_sequence", "###"),
    (Finish("length"), "max_tokens", None),
]
TYPES = {
    "message_start": types.RawMessageStartEvent, "content_block_start": types.RawContentBlockStartEvent,
    "content_block_delta": types.RawContentBlockDeltaEvent, "content_block_stop": types.RawContentBlockStopEvent,
    "message_delta": types.RawMessageDeltaEvent, "message_stop": types.RawMessageStopEvent,
}  # fmt: skip


def form() -> MessagesForm:
    request = MessagesRequest.model_validate(ASKED)
    return MessagesForm(request, Envelope.new("msg_", "tiny", "fp_0"), None)


class Server:
    """Answers every request with the same pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = cut(TEXT, [3, 8, 9], END)
        self.error: ApiError | None = None
        self.url = ""

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/messages/count_tokens":
            messages = read(CountTokensRequest, body).to_prompt(Limits()).messages
            return 200, dumps({"input_tokens": len(messages)})
        assert path == "/v1/messages"
        try:
            job = job_of(MessagesRequest, body)
        except ApiError as error:
            return error.status, dumps(error.anthropic())
        return 200, answer(form(), self.pieces, job.stream, self.error)

    @property
    def client(self) -> Any:
        return anthropic.Anthropic(base_url=self.url, api_key="k", max_retries=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server) as server.url:
        yield server


@pytest.mark.parametrize(("finish", "reason", "sequence"), FINISHES)
def test_a_message_is_the_same_whole_and_streamed(
    server: Server, finish: Finish, reason: str, sequence: str | None
) -> None:
    server.pieces = cut(TEXT, [3, 8, 9], finish)
    message = server.client.messages.create(**ASKED, system="be brief", stop_sequences=["###"])
    with server.client.messages.stream(**ASKED) as received:
        texts = list(received.text_stream)
        final = received.get_final_message()
    assert "".join(texts) == TEXT and len(texts) == 4
    for own in (message, final):
        types.Message.model_validate(own.model_dump())
        assert [block.text for block in own.content] == [TEXT]
        assert (own.stop_reason, own.stop_sequence, own.model, own.role) == (reason, sequence, "tiny", "assistant")
        assert (own.usage.input_tokens, own.usage.cache_read_input_tokens, own.usage.output_tokens) == (7, 4, 4)
        assert own.id.startswith("msg_")


def test_the_asynchronous_client_reads_them_too(server: Server) -> None:
    async def ask() -> tuple[Any, Any]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client:
            message = await client.messages.create(**ASKED)
            async with client.messages.stream(**ASKED) as received:
                return message, await received.get_final_message()

    message, final = asyncio.run(ask())
    assert message.content[0].text == final.content[0].text == TEXT


def test_events_of_a_stream_come_in_order(server: Server) -> None:
    received = list(server.client.messages.create(**ASKED, stream=True))
    assert [event.type for event in received] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert received[0].message.usage.input_tokens == 11 and received[0].message.stop_reason is None
    assert {event.index for event in received[1:7]} == {0}
    names = [name for name, _ in events(stream(form(), server.pieces))]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert b"[DONE]" not in stream(form(), server.pieces)


@pytest.mark.parametrize(("status", "kind"), [(500, "api_error"), (503, "overloaded_error"), (429, "rate_limit_error")])
def test_an_error_amid_a_stream_is_raised(server: Server, status: int, kind: str) -> None:
    server.pieces, server.error = [Piece(0, "so f")], ApiError(status, "the step failed")
    with server.client.messages.stream(**ASKED) as received:
        texts: list[str] = []
        with pytest.raises(anthropic.APIStatusError) as caught:
            texts += received.text_stream
    assert caught.value.body == {"type": "error", "error": {"type": kind, "message": "the step failed"}}
    assert received.current_message_snapshot.content[0].text == "so f"


def test_a_refusal_is_an_error_of_theirs(server: Server) -> None:
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers: only the client's own tools"):
        server.client.messages.create(**ASKED, extra_body={"mcp_servers": [{"url": "u"}]})


def test_tokens_are_counted(server: Server) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"}
    assert server.client.messages.count_tokens(**asked, system="be brief").input_tokens == 2


@settings(max_examples=60, deadline=None)
@given(st.text(), st.lists(st.integers(0, 40), max_size=6), st.sampled_from(FINISHES))
def test_a_stream_is_the_whole_in_pieces(text: str, places: list[int], ending: tuple[Finish, str, str | None]) -> None:
    pieces = cut(text, places, ending[0])
    received = events(stream(form(), pieces))
    single = form().whole([whole(pieces)], usage(len(pieces)))
    assert all(name == event["type"] for name, event in received)
    deltas = [event["delta"]["text"] for name, event in received if name == "content_block_delta"]
    assert "".join(deltas) == single["content"][0]["text"] == text and all(deltas)
    last = received[-2][1]
    assert last["usage"] == single["usage"]
    assert last["delta"] == {name: single[name] for name in ("stop_reason", "stop_sequence")}
    for name, event in received:
        if name != "ping":
            TYPES[name].model_validate(event)
