"""Every endpoint through the real SDKs, and an endpoint of one's own."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
from pace.server import app
from pace.server.endpoints import ENDPOINTS, Endpoint
from pace.server.errors import invalid
from pace.server.network import http
from pace.server.schemas.fields import Request
from tests.server.serving import ANSWER, LONG, QUESTION, Serving
from tests.waiting import PATIENCE

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")


@pytest.fixture
def client(serving: Serving):
    return openai.OpenAI(base_url=serving.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture
def claude(serving: Serving):
    return anthropic.Anthropic(base_url=serving.url, api_key="none", max_retries=0)


def test_responses(client):
    asked = {"model": "tiny", "input": QUESTION[0]["content"], "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == ANSWER and whole.status == "completed"
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == ANSWER and final.usage == whole.usage
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    cut = client.responses.create(**asked, max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"


def test_messages(claude):
    asked = {"model": "tiny", "messages": QUESTION, "max_tokens": 40, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    assert whole.content[0].text == ANSWER and whole.stop_reason == "end_turn"
    with claude.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens
    stopped = claude.messages.create(**asked, stop_sequences=["is P"])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == "is P"
    counted = claude.messages.count_tokens(model="tiny", messages=QUESTION)
    assert counted.input_tokens == whole.usage.input_tokens


def test_errors_in_each_form(client, claude, serving):
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=QUESTION, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="tiny", messages=QUESTION, max_tokens=-1)
    assert refused.value.body["type"] == "error" and refused.value.body["error"]["type"] == "invalid_request_error"
    assert serving.ask("/v1/messages", {"messages": []}).json["type"] == "error"


def test_what_the_tokenizer_answers(serving):
    text = "Hello, world"
    tokens = serving.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).json
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == serving.service.max_length
    assert serving.ask("/detokenize", {"tokens": tokens["tokens"]}).json["prompt"] == text
    template = serving.ask("/apply-template", {"messages": QUESTION}).json["prompt"]
    assert QUESTION[0]["content"] in template
    num_tokens = len(serving.generator.tokenizer(template, add_special_tokens=False)["input_ids"])
    counted = serving.ask("/v1/responses/input_tokens", {"model": "tiny", "input": QUESTION[0]["content"]}).json
    assert counted["input_tokens"] == num_tokens
    assert serving.ask("/chat/completions/input_tokens", {"messages": QUESTION}).json == {"input_tokens": num_tokens}
    assert serving.ask("/tokenizer_info").json["eos_token"] == "<|end|>"
    assert serving.ask("/tokenize", {"prompt": "a" * 100_000}).status == 400


class ShoutRequest(Request):
    UNSUPPORTED = {"whisper": "this endpoint shouts"}

    text: str


class ShoutEndpoint(Endpoint):
    async def answer(self, service, request, headers, scope, send) -> None:
        if not request.text:
            raise invalid("text", "must not be empty")
        await http.send_json(send, {"text": request.text.upper()}, headers=headers)


def test_an_endpoint_is_a_class_a_schema_and_a_line_in_the_table(monkeypatch):
    monkeypatch.setattr(app, "ENDPOINTS", [*ENDPOINTS, ShoutEndpoint(("/v1/shout", "/shout"), ShoutRequest)])
    with Serving() as serving:
        reply = serving.ask("/v1/shout", {"text": "hi", "wat": 1})
        assert reply.json == {"text": "HI"} and reply.headers["x-pace-ignored"] == "wat"
        for body, param in (({"text": ""}, "text"), ({}, "text"), ({"text": "a", "whisper": True}, "whisper")):
            refused = serving.ask("/shout", body)
            assert refused.status == 400 and refused.error["param"] == param
        assert serving.ask("/v1/shout").status == 405
        assert "/v1/shout" in serving.ask("/openapi.json").json["paths"]
        assert b'http_requests_total{route="/v1/shout",status="400"} 3.0' in serving.ask("/metrics").body


def test_the_page_is_there_and_is_not_sent_twice(serving):
    first = serving.ask("/")
    assert first.status == 200 and b"<!doctype html>" in first.body[:40].lower()
    assert "default-src 'none'" in first.headers["content-security-policy"]
    again = serving.ask("/", If_None_Match=first.headers["etag"])
    assert again.status == 304 and not again.body


def test_keys_open_everything_but_the_page_and_keep_prompts_apart():
    with Serving(keys=("first-key", "second-key")) as serving:
        for path in ("/v1/models", "/metrics", "/limits", "/openapi.json", "/tokenizer_info"):
            assert serving.ask(path).status == 401
        for path in ("/", "/live", "/health", "/ready"):
            assert serving.ask(path).status == 200
        body = {"messages": [{"role": "user", "content": "A secret of a few blocks. " * 8}], "max_tokens": 1}

        def cached(key: str) -> int:
            reply = serving.ask("/v1/chat/completions", body, Authorization=f"Bearer {key}")
            assert reply.status == 200 and reply.headers["x-request-id"]
            return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("first-key") == 0 and cached("first-key") > 0
        assert cached("second-key") == 0
        assert serving.ask("/v1/chat/completions", body).status == 401


def test_many_clients_at_once_and_a_drain(serving):
    import asyncio

    from tests.server.test_load import ask_many

    with Serving() as own:

        async def play() -> list[tuple[int, bytes]]:
            asked = asyncio.create_task(ask_many(own, [{"messages": LONG, "temperature": 0, "max_tokens": 60}] * 16))
            scheduler = own.generator.engine.scheduler
            while len(scheduler.running) + len(scheduler.waiting) < 16 and not asked.done():
                await asyncio.sleep(0.005)  # requests in the engine are answered; later ones would be refused
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(own.service.drain(PATIENCE), own.loop))
            late = await ask_many(own, [{"messages": QUESTION}])
            return await asked + late

        replies = asyncio.run(play())
    assert [status for status, _ in replies] == [200] * 16 + [503]
