"""Routing of requests to replicas: a request's key, and the ranking of replicas. No cluster."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from pace.integrations.ray.routing import FEW, START_CHARACTERS, prefix_key, ranking

SYSTEM = {"role": "system", "content": "Be brief."}
HELLO, ANSWER, MORE = (
    {"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Ho"), ("user", "?"))
)
NAMES = ["a1", "b2", "c3", "d4"]


def key(salt: str | None = None, **request: object) -> str:
    return prefix_key(json.dumps(request).encode(), salt)


@pytest.mark.parametrize(
    "first, later",
    [({"messages": [SYSTEM, HELLO]}, {"messages": [SYSTEM, HELLO, ANSWER, MORE], "temperature": 1}),
     ({"system": "s", "messages": [HELLO]}, {"system": "s", "messages": [HELLO, ANSWER, MORE]}),
     ({"input": [HELLO]}, {"input": [HELLO, {"type": "reasoning"}, ANSWER, MORE]}),
     ({"prompt": "x" * START_CHARACTERS}, {"prompt": "x" * START_CHARACTERS + "y"}),
     ({"prompt": ["x", "y"]}, {"prompt": "x"}), ({"prompt": list(range(300))}, {"prompt": [list(range(400))]}),
     ({"messages": [HELLO], "prompt_cache_key": "k"}, {"messages": [MORE], "prompt_cache_key": "k"})],
)  # fmt: skip
def test_a_conversation_keeps_its_key(first, later):
    assert key(**first) == key(**later) != ""


@pytest.mark.parametrize(
    "one, other",
    [({"messages": [SYSTEM, HELLO]}, {"messages": [SYSTEM, MORE]}),
     ({"messages": [SYSTEM, HELLO]}, {"messages": [HELLO]}),
     ({"system": "s", "messages": [HELLO]}, {"system": "t", "messages": [HELLO]}),
     ({"instructions": "s", "input": "Hi"}, {"instructions": "t", "input": "Hi"}), ({"prompt": "x"}, {"prompt": "y"}),
     ({"prompt": "x", "cache_salt": "a"}, {"prompt": "x", "cache_salt": "b"}),
     ({"prompt": "x", "salt": "a"}, {"prompt": "x", "salt": "b"})],
)  # fmt: skip
def test_what_begins_otherwise_has_another_key(one, other):
    assert "" != key(**one) != key(**other) != ""


@pytest.mark.parametrize(
    "body",
    [b"", b"[", b"[" * 100_000, b"7", b"[]", b"{}", b"\xff", b'{"messages": 5}', b'{"prompt": {}}', b'{"prompt": []}'],
)
def test_a_body_without_a_beginning_has_no_key(body):
    assert prefix_key(body, None) == ""


@pytest.mark.parametrize("messages", [[], ["Hi"], [None], [{"role": 5}], [ANSWER]])
def test_odd_conversations_have_some_key(messages):
    assert key(messages=messages)


def test_keys_are_shared_out_and_stay_where_they_are():
    keys = [f"key {i}" for i in range(4000)]
    chosen = [ranking(key, NAMES, NAMES, [0] * 4, 1.25)[0] for key in keys]
    assert min(Counter(chosen).values()) > 4000 / 4 * 0.85
    assert chosen == [ranking(key, NAMES[::-1], NAMES[::-1], [0] * 4, 1.25)[0] for key in keys]
    fewer = [ranking(key, NAMES[:3], NAMES[:3], [0] * 3, 1.25)[0] for key in keys]
    assert all(after == before for before, after in zip(chosen, fewer) if before != "d4")
    assert len(set(after for before, after in zip(chosen, fewer) if before == "d4")) == 3


def test_a_replica_that_is_far_above_the_average_comes_last():
    first, second = ranking("k", NAMES, NAMES, [0] * 4, 1.25)[:2]
    index = NAMES.index(first)

    def loads(own: int, others: int) -> list[int]:
        return [own if i == index else others for i in range(4)]

    assert ranking("k", NAMES, NAMES, loads(12, 10), 1.25)[0] == first
    passed_by = ranking("k", NAMES, NAMES, loads(20, 10), 1.25)
    assert passed_by[0] == second and passed_by[-1] == first
    assert ranking("k", NAMES, NAMES, loads(20, 10), 4.0)[0] == first
    assert ranking("k", NAMES, NAMES, loads(FEW - 1, 0), 1.25)[0] == first
    assert ranking("k", NAMES, NAMES, loads(FEW, 0), 1.25)[0] == second
    assert all(sorted(ranking("k", NAMES, NAMES, [n] * 4, 1.0)) == NAMES for n in range(3))
