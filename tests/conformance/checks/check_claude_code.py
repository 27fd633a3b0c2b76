"""Anthropic's Claude Code in three turns, with the setup of docs/integrations.md."""

from __future__ import annotations

import os

import pytest

from tests.conformance.checks.session import *  # noqa: F403
from tests.conformance.checks.session import Session
from tests.conformance.coding import CONTEXT, NAME, QUESTIONS, Client, Turn, objects, settings


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    lines = settings("export ").splitlines()
    variables = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
    client = Client(tmp_path_factory.mktemp("claude_code"), **variables)
    turns, texts = [], []
    for number, question in enumerate(QUESTIONS):
        go_on = ["--continue"] if number else []
        options = ["--model", NAME, "--output-format", "json", "--permission-mode", "acceptEdits"]
        code, output = client.run(os.environ["PACE_CLIENT"], "--print", question, *options, *go_on)
        result = next((found for found in objects(output) if found.get("type") == "result"), {})
        usage = result.get("usage", {})
        cached = usage.get("cache_read_input_tokens", 0)
        turns.append(Turn(code, result.get("result", ""), cached + usage.get("input_tokens", 0), cached, output))
        texts.append(client.file.read_text())
    return Session(client, turns, texts)


def test_the_client_knows_the_context_of_the_model(session):
    used = objects(session.turns[0].output)[-1]["modelUsage"]
    assert {name: one["contextWindow"] for name, one in used.items()} == {NAME: CONTEXT}
