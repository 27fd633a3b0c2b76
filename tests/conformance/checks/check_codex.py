"""OpenAI's Codex in three turns, with the setup of docs/integrations.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.checks.session import *  # noqa: F403
from tests.conformance.checks.session import Session
from tests.conformance.coding import QUESTIONS, Client, Turn, objects, settings


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    client = Client(tmp_path_factory.mktemp("codex"))
    (client.home / ".codex").mkdir()
    (client.home / ".codex" / "config.toml").write_text(settings("# ~/.codex/config.toml"))
    turns, texts, counted = [], [], (0, 0)
    for number, question in enumerate(QUESTIONS):
        go_on = ["resume", "--last"] if number else []
        command = [os.environ["PACE_CLIENT"], "exec", "--sandbox", "workspace-write", "--json", *go_on, question]
        code, output = client.run(*command)
        events = objects(output)
        said = [event["item"]["text"] for event in events if event.get("item", {}).get("type") == "agent_message"]
        usage = next((event["usage"] for event in events if event["type"] == "turn.completed"), None)
        # Totals of the session so far.
        total = (usage["input_tokens"], usage["cached_input_tokens"]) if usage else counted
        turns.append(Turn(code, said[-1] if said else "", total[0] - counted[0], total[1] - counted[1], output))
        texts.append(client.file.read_text())
        counted = total
    return Session(client, turns, texts)


def test_the_change_is_one_of_the_clients_own(session):
    items = [event["item"] for event in objects(session.turns[1].output) if event["type"] == "item.completed"]
    changes = [item["changes"] for item in items if item["type"] == "file_change"]
    assert [[Path(change["path"]).name for change in change] for change in changes] == [[session.client.file.name]]
