"""Regular expressions of module paths: the answers of `re`, in bounded time."""

from __future__ import annotations

import random
import re

import pytest

from pace.llm.adapters.patterns import Pattern
from tests.waiting import cpu_limit

ATOMS = ["a", "b", ".", r"\.", r"\d", "[ab]", "[^a]", "(a|b)", "(?:ab|a)", "(b.|a)", "[a-c]", r"\w", r"\W", "^", "$",
         r"[\d.]", "0", "[]a]", r"[\-.]", "a{", ""]  # fmt: skip
REPEATS = ["", "", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "{,}", "{}", "*?", "+?"]


def expected(key: str, path: str) -> bool:
    """PEFT's way to match a key."""
    return re.match(rf"(.*\.)?({key})$", path) is not None


def test_answers_are_those_of_re():
    draw = random.Random(0)
    count = 0
    while count < 1500:
        key = "".join(draw.choice(ATOMS) + draw.choice(REPEATS) for _ in range(draw.randint(1, 5)))
        if draw.random() < 0.3:
            key = f"({key})" + draw.choice(["*", "?", "|a", "{0,3}"])
        try:
            re.compile(key)
        except re.error:
            with pytest.raises(ValueError, match="not a regular expression"):
                Pattern(key)
            continue
        if "*+" in key or "++" in key or "?+" in key or "}+" in key:
            continue  # possessive, which is refused
        path = "".join(draw.choice("ab.0c²") for _ in range(draw.randint(0, 9)))
        assert Pattern(key).matches(path) == expected(key, path), (key, path)
        count += 1


@pytest.mark.parametrize(
    "key",
    [
        "q_proj",
        r"layers\.[01]\.mlp\.down_proj",
        r".*\.(q|v)_proj",
        r"^model\.layers\.(1?\d)\..*",
        "layers.0",
        "proj",
        "q.proj",
    ],
)
def test_patterns_that_people_write(key):
    for layer in (0, 1, 12):
        for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
            path = f"model.layers.{layer}.{module}"
            assert Pattern(key).matches(path) == expected(key, path), path


@pytest.mark.parametrize(
    "key",
    [
        "(a|a)*b",
        "(a*)*b",
        "(.*)*x",
        "((((a?)*)*)*)*b",
        r"(\w+\.?)*!",
        "(a{0,900}){0,900}c",
        "(a|aa|aaa)+b",
        "(.*)*(.*)*(.*)*y",
    ],
)
@pytest.mark.alone
def test_no_pattern_hangs(key):
    """`re` would take years for most of these."""
    with cpu_limit(20, "a bound of steps, which take a second"):
        try:
            assert not Pattern(key).matches("a." * 150)
        except ValueError as error:
            assert "takes too long" in str(error)


@pytest.mark.parametrize("key", [r"(a)\1", "(?=a)a", "(?<!a)b", "(?i)a", r"a\b", "(?P<x>a)", "a{2000}"])
def test_other_syntax_is_refused(key):
    with pytest.raises(NotImplementedError, match="is not implemented"):
        Pattern(key)


def test_deep_patterns():
    with pytest.raises(ValueError, match="not a regular expression"):
        Pattern("(" * 500 + "a" + ")" * 500)
