"""guidance's model for OpenAI's chat, with roles, text and plain generation, and its model for vLLM, with a grammar."""

from __future__ import annotations

import os

import pytest
from guidance import assistant, gen, models, system, user

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


@pytest.fixture
def model():
    return models.OpenAI("tiny", api_key="none", base_url=f"{os.environ['PACE_URL']}/v1", echo=False)


def ask(model, **more):
    with user():
        model += QUESTION
    with assistant():
        model += gen(name="answer", max_tokens=40, temperature=0.0, **more)
    return model


def test_generated_text_is_captured(model):
    assert ask(model)["answer"] == ANSWER


def test_a_system_prompt_and_two_rounds(model):
    with system():
        model += "You are a helpful assistant."
    first = ask(model)
    second = ask(first)
    assert first["answer"] and second["answer"]
    assert str(second).count(QUESTION) == 2


def test_max_tokens(model):
    with user():
        model += QUESTION
    with assistant():
        model += gen(name="answer", max_tokens=2, temperature=0.0)
    assert ANSWER.startswith(model["answer"]) and len(model["answer"]) < len(ANSWER)


def test_a_regular_expression():
    model = models.experimental.VLLMModel("tiny", api_key="none", base_url=f"{os.environ['PACE_URL']}/v1", echo=False)
    assert ask(model, regex="[0-9]+")["answer"].isdigit()
