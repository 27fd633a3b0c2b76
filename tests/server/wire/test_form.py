"""JSON and events as they are sent over the wire."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pace.server.wire.form import data_event, dumps, named_event

VALUES = st.recursive(st.none() | st.integers() | st.text(), st.lists)


@given(VALUES)
def test_json_is_one_line_for_every_reader(value: Any) -> None:
    text = dumps(value).decode()
    assert json.loads(text) == value and len(text.splitlines()) == 1


def test_line_ends_of_unicode_are_escaped() -> None:
    assert dumps("a\u2028b\u2029c\x85d\ne") == b'"a\\u2028b\\u2029c\\u0085d\\ne"'
    assert dumps("é") == '"é"'.encode() and dumps("\ud800é") == b'"\\ud800\\u00e9"'


def test_events_are_as_the_standard_wants() -> None:
    assert data_event({"a": 1}) == b'data: {"a":1}\n\n'
    assert named_event("n", {"a": "\n"}) == b'event: n\ndata: {"a":"\\n"}\n\n'
