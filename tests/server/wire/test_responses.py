"""Our responses as OpenAI's own client reads them, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openai")
import openai
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses as types

from pace.llm.configs import SamplingConfig
from pace.llm.sequence import TokenLogprob
from pace.llm.text.token_texts import TokenPiece
from pace.server.answers import Finish, Piece
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.schemas.responses import ResponsesRequest
from pace.server.wire.openai import Envelope
from pace.server.wire.responses import ResponsesForm
from tests.server.schemas.requests import read
from tests.server.wire.scripted import answer, cut, events, serving, stream, usage, whole

TEXT = "Grüße,\n🦊 “quoted” \u2028 \\ and more"
STOP, LENGTH = Finish("stop"), Finish("length")
TYPES = {
    "response.created": types.ResponseCreatedEvent, "response.in_progress": types.ResponseInProgressEvent,
    "response.output_item.added": types.ResponseOutputItemAddedEvent,
    "response.content_part.added": types.ResponseContentPartAddedEvent,
    "response.output_text.delta": types.ResponseTextDeltaEvent,
    "response.output_text.done": types.ResponseTextDoneEvent,
    "response.content_part.done": types.ResponseContentPartDoneEvent,
    "response.output_item.done": types.ResponseOutputItemDoneEvent, "response.completed": types.ResponseCompletedEvent,
    "response.incomplete": types.ResponseIncompleteEvent, "response.failed": types.ResponseFailedEvent,
}  # fmt: skip


def form_of(body: dict[str, Any]) -> tuple[ResponsesForm, bool]:
    """The wire form that the route makes for a request, and True if the request streams."""
    request = read(ResponsesRequest, body)
    job = request.to_job(Limits(), SamplingConfig())
    return ResponsesForm(request, Envelope.new("resp_", "tiny", "fp_0"), None), job.stream


class Server:
    """Answers every request with the same pieces."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = cut(TEXT, [3, 8, 9], STOP)
        self.error: ApiError | None = None
        self.url = ""

    def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        assert path == "/v1/responses"
        form, is_stream = form_of(body)
        return 200, answer(form, self.pieces, is_stream, self.error)

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="k", max_retries=0)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    with serving(server) as server.url:
        yield server


def test_a_whole_response(server: Server) -> None:
    response = server.client.responses.create(
        model="tiny", input="hi", instructions="be brief", temperature=0, max_output_tokens=9, metadata={"a": "b"}
    )
    types.Response.model_validate(response.model_dump())
    assert response.output_text == TEXT and response.status == "completed" and response.error is None
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert response.instructions == "be brief" and response.metadata == {"a": "b"}
    assert response.temperature == 0 and response.top_p is None and response.max_output_tokens == 9
    assert response.incomplete_details is None and response.completed_at >= response.created_at
    counts = response.usage
    assert (counts.input_tokens, counts.output_tokens, counts.total_tokens) == (11, 4, 15)
    assert counts.input_tokens_details.cached_tokens == 4 and counts.output_tokens_details.reasoning_tokens == 0


def test_events_of_a_stream_come_in_order_and_are_numbered(server: Server) -> None:
    received = list(server.client.responses.create(model="tiny", input="hi", stream=True))
    assert [event.type for event in received] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in received] == list(range(12))
    for event in received:
        TYPES[event.type].model_validate(event.model_dump())
    assert "".join(event.delta for event in received[4:8]) == received[8].text == TEXT
    assert received[0].response.usage is None and received[0].response.status == "in_progress"
    assert received[-1].response.usage.output_tokens == 4


def test_the_client_accumulates_a_stream(server: Server) -> None:
    with server.client.responses.stream(model="tiny", input="hi") as received:
        deltas = [event.snapshot for event in received if event.type == "response.output_text.delta"]
        response = received.get_final_response()
    assert deltas[-1] == response.output_text == TEXT
    assert response.output[0].status == response.status == "completed"


def test_the_asynchronous_client_does_too(server: Server) -> None:
    async def ask() -> tuple[Any, Any, list[Any]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
            response = await client.responses.create(model="tiny", input="hi")
            async with client.responses.stream(model="tiny", input="hi") as received:
                final = await received.get_final_response()
            raw = await client.responses.create(model="tiny", input="hi", stream=True)
            return response, final, [event async for event in raw]

    response, final, raw = asyncio.run(ask())
    assert response.output_text == final.output_text == raw[-1].response.output_text == TEXT


def test_a_response_that_was_cut_off_is_incomplete(server: Server) -> None:
    server.pieces = cut(TEXT, [5], LENGTH)
    response = server.client.responses.create(model="tiny", input="hi", max_output_tokens=2)
    last = list(server.client.responses.create(model="tiny", input="hi", max_output_tokens=2, stream=True))[-1]
    assert last.type == "response.incomplete"
    for incomplete in (response, last.response):
        assert incomplete.status == incomplete.output[0].status == "incomplete" and incomplete.output_text == TEXT
        assert incomplete.incomplete_details.reason == "max_output_tokens" and incomplete.completed_at is None


@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "server_error"), (503, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")],
)
def test_an_error_amid_a_stream_is_its_last_event(server: Server, status: int, code: str) -> None:
    server.pieces, server.error = [Piece(0, "so f"), Piece(0, "ar")], ApiError(status, "the step failed")
    received = list(server.client.responses.create(model="tiny", input="hi", stream=True))
    last = received[-1]
    assert [event.type for event in received[4:]] == ["response.output_text.delta"] * 2 + ["response.failed"]
    types.ResponseFailedEvent.model_validate(last.model_dump())
    assert last.sequence_number == 6 and last.response.status == "failed" and last.response.output_text == "so far"
    assert (last.response.error.code, last.response.error.message) == (code, "the step failed")
    with server.client.responses.stream(model="tiny", input="hi") as again, pytest.raises(RuntimeError):
        again.get_final_response()


def test_a_refusal_names_the_field(server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id" and "stored" in caught.value.message


@settings(max_examples=60, deadline=None)
@given(st.text(), st.lists(st.integers(0, 40), max_size=6), st.sampled_from([STOP, LENGTH]))
def test_a_stream_is_the_whole_in_pieces(text: str, places: list[int], finish: Finish) -> None:
    pieces = cut(text, places, finish)
    received = events(stream(form_of({"input": "hi", "stream": True})[0], pieces))
    by_name = {name: event for name, event in received}
    assert all(name == event["type"] for name, event in received)
    assert [event["sequence_number"] for _, event in received] == list(range(len(received)))
    assert "".join(event["delta"] for name, event in received if name == "response.output_text.delta") == text
    done = by_name["response.output_item.done"]["item"]
    assert by_name["response.output_text.done"]["text"] == text
    assert by_name["response.content_part.done"]["part"] == done["content"][0]
    assert "usage" not in by_name["response.created"]["response"]  # not known yet, and their schema does not allow null
    end = received[-1][1]["response"]
    single = form_of({"input": "hi"})[0].whole([whole(pieces)], usage(len(pieces)))
    for response in (end, single):
        for own in (response, response["output"][0]):
            del own["id"]
        del response["created_at"], response["completed_at"]
    assert end == single
    for name, event in received[:-1]:
        TYPES[name].model_validate(event)


def test_log_probabilities_come_with_their_text() -> None:
    tokens = [
        TokenPiece(5, "ab", b"ab", TokenLogprob(5, -0.5, ((5, -0.5), (6, float("-inf"))))),
        TokenPiece(7, "c", b"c", TokenLogprob(7, -1.5, ((7, -1.5), (5, -2.0)))),
        TokenPiece(2, "", b"<|end|>", TokenLogprob(2, -0.1, ((2, -0.1),)), is_end=True),
    ]
    pieces = [Piece(0, "ab", tokens[:1]), Piece(0, "c", tokens[1:2]), Piece(0, "", tokens[2:], STOP)]
    body = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    received = events(stream(form_of(body)[0], pieces))
    deltas = [event for name, event in received if name == "response.output_text.delta"]
    assert [[entry["token"] for entry in delta["logprobs"]] for delta in deltas] == [["ab"], ["c"]]
    assert [top["logprob"] for top in deltas[0]["logprobs"][0]["top_logprobs"]] == [-0.5, -9999.0]
    for name, event in received:
        TYPES[name].model_validate(event)
    single = form_of(body)[0].whole([whole(pieces)], usage(3))
    part = types.Response.model_validate(single).output[0].content[0]
    assert bytes(byte for entry in part.logprobs for byte in entry.bytes).decode() == "abc"
    assert json.loads(json.dumps(single))["output"][0]["content"] == received[-1][1]["response"]["output"][0]["content"]


def test_tokens_are_shown_to_those_who_ask() -> None:
    tokens = [TokenPiece(5, "ab", b"ab", TokenLogprob(5, -0.5))]
    received = events(stream(form_of({"input": "hi"})[0], [Piece(0, "ab", tokens, STOP)]))
    assert [event["logprobs"] for name, event in received if name == "response.output_text.delta"] == [[]]
