"""kani's engine for OpenAI: rounds of a chat, streams, and the token count that it records for each message."""

from __future__ import annotations

import asyncio
import os

import pytest
from kani import ChatMessage, Kani
from kani.engines.openai import OpenAIEngine
from transformers import AutoTokenizer

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


@pytest.fixture(params=["chat_completions", "responses"])
def engine(request):
    tokenizer = AutoTokenizer.from_pretrained(os.environ["PACE_MODEL"])
    more = {"max_output_tokens": 40} if request.param == "responses" else {"max_tokens": 40}
    return OpenAIEngine(
        "none", "tiny", max_context_size=1024, api_type=request.param, api_base=f"{os.environ['PACE_URL']}/v1",
        tokenizer=tokenizer, temperature=0, **more,
    )  # fmt: skip


def run(coroutine):
    async def within():
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(within())


def test_a_round(engine):
    assert run(Kani(engine).chat_round_str(QUESTION)) == ANSWER


def test_a_system_prompt_and_a_second_round(engine):
    async def rounds():
        chat = Kani(engine, system_prompt="You are a helpful assistant.")
        first = await chat.chat_round_str(QUESTION)
        second = await chat.chat_round_str("What is the capital of Spain?")
        return first, second, chat.chat_history

    first, second, history = run(rounds())
    assert first and second
    assert [message.role.value for message in history] == ["user", "assistant"] * 2


def test_a_stream(engine):
    async def streamed():
        stream = Kani(engine).chat_round_stream(QUESTION)
        pieces = [token async for token in stream]
        return pieces, await stream.message()

    pieces, message = run(streamed())
    assert "".join(pieces) == message.text == ANSWER


def test_the_tokens_of_a_completion(engine):
    async def predicted():
        return await engine.predict([ChatMessage.user(QUESTION)])

    completion = run(predicted())
    assert completion.message.text == ANSWER
    assert completion.prompt_tokens > 5 and completion.completion_tokens > 5


def test_a_conversation_of_given_messages(engine):
    async def asked():
        history = [ChatMessage.user("My name is Tom."), ChatMessage.assistant("Hello, Tom.")]
        return await Kani(engine, chat_history=history).chat_round_str("What is my name?")

    assert run(asked())
