"""Checks for a session with any coding client. The client's module has a fixture `session`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.coding import AFTER, ANSWERS, BEFORE, Client, Turn, requests


@dataclass
class Session:
    client: Client
    turns: list[Turn]
    texts: list[str]
    """The file after each turn."""


def test_the_client_reads_a_file_with_its_tools(session):
    first = session.turns[0]
    assert (first.code, first.answer) == (0, ANSWERS[0]), first
    assert session.texts[0] == BEFORE + "\n"


def test_the_client_edits_the_file_with_its_tools(session):
    second = session.turns[1]
    assert (second.code, second.answer) == (0, ANSWERS[1]), second
    assert session.texts[1] == AFTER + "\n"


def test_the_client_goes_on_in_text(session):
    third = session.turns[2]
    assert (third.code, third.answer) == (0, ANSWERS[2]), third
    assert session.texts[2] == AFTER + "\n"


def test_later_turns_find_their_prompts_in_the_prefix_cache(session):
    for turn in session.turns[1:]:
        assert turn.num_tokens > 5000 and turn.num_cached > 0.9 * turn.num_tokens, turn


def test_no_request_was_refused(session):
    found = requests(Path(os.environ["PACE_LOG"]))
    refused = [line for line in found if line["status"] != "200" and line["path"] != "/ready"]
    assert not refused, refused
    answered = [line for line in found if line["completion_tokens"] != "-"]
    assert len(answered) == 5, answered  # two with calls, three with text


def test_nobody_but_the_server_was_asked(session):
    assert not session.client.hosts, session.client.hosts
