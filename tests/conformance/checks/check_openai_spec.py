"""Every answer with status 200 and every event of a stream matches its schema in OpenAI's description."""

from __future__ import annotations

import json

import httpx
import pytest
from openai_description import URL, check, post

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CHAT = {"messages": QUESTION, "max_tokens": 12}
TEXT = {"prompt": "1, 2, 3,", "max_tokens": 8}
RESPONSE = {"input": "What is the capital of France?", "max_output_tokens": 16}

WHOLE = [
    *[("/chat/completions", "CreateChatCompletionResponse", CHAT | more) for more in (
        {}, {"logprobs": True, "top_logprobs": 3}, {"n": 3, "temperature": 1.0, "seed": 1}, {"stop": ["Paris"]},
        {"logprobs": True, "stop": "Par"}, {"seed": 5, "user": "u", "metadata": {"a": "b"}},
    )],
    *[("/completions", "CreateCompletionResponse", TEXT | more) for more in (
        {}, {"logprobs": 3}, {"echo": True, "logprobs": 1, "max_tokens": 1}, {"n": 2, "best_of": 3},
        {"prompt": ["a", "b"]}, {"prompt": [[5, 6, 7], [8]]}, {"echo": True, "max_tokens": 0},
    )],
    *[("/responses", "Response", RESPONSE | more) for more in (
        {}, {"instructions": "Be brief."}, {"max_output_tokens": 1}, {"metadata": {"a": "b"}},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    )],
    ("/responses/input_tokens", "TokenCountsResource", {"input": "Hi"}),
]  # fmt: skip
STREAMED = [
    *[("/chat/completions", "CreateChatCompletionStreamResponse", CHAT | more) for more in (
        {}, {"stream_options": {"include_usage": True}}, {"logprobs": True, "top_logprobs": 2},
        {"n": 2, "temperature": 1.0}, {"stop": "Par", "logprobs": True},
    )],
    *[("/completions", "CreateCompletionResponse", TEXT | more) for more in ({}, {"logprobs": 2}, {"echo": True,
    "n": 2})],
    *[("/responses", "ResponseStreamEvent", RESPONSE | more) for more in (
        {}, {"max_output_tokens": 1}, {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    )],
]  # fmt: skip
FAULTS = [
    ("/chat/completions", {}, 400),
    ("/chat/completions", CHAT | {"model": "none"}, 404),
    ("/completions", TEXT | {"n": 0}, 400),
    ("/responses", {"input": 5}, 400),
]


@pytest.mark.parametrize("path, schema, body", WHOLE, ids=repr)
def test_an_answer(path, schema, body):
    answer = post(path, body)
    assert answer.status_code == 200, answer.text
    check(answer.json(), schema)


@pytest.mark.parametrize("path, schema, body", STREAMED, ids=repr)
def test_events_of_a_stream(path, schema, body):
    answer = post(path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
    assert len(events) >= 2
    for event in events:
        if event != "[DONE]":
            check(json.loads(event), schema)


@pytest.mark.parametrize("path, body, status", FAULTS, ids=repr)
def test_an_error(path, body, status):
    answer = post(path, body)
    assert answer.status_code == status
    check(answer.json(), "ErrorResponse")


def test_models():
    listed = httpx.get(f"{URL}/v1/models").json()
    check(listed, "ListModelsResponse")
    check(httpx.get(f"{URL}/v1/models/{listed['data'][0]['id']}").json(), "Model")
