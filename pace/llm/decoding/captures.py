"""Captures: the parts of a generated text to which its grammar gives names."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import Any

from pace.grammar import Grammar
from pace.llm.decoding.token_bytes import TokenBytes
from pace.llm.outputs import Capture
from pace.llm.sequence import TokenLogprob

_CAPTURE = re.compile(r"\[[^\]\n]*\bcapture\b")


class CaptureReader:
    """Finds the captures of a text by reading it again, token by token, after it is done."""

    def __init__(self, matcher: Any, end_token: int, tokenizer: Any) -> None:
        """`matcher` is an `LLMatcher` at its start, to be copied; `end_token` is what it takes for the end of a text.
        Raises ValueError where llguidance is too old to tell."""
        if not hasattr(matcher, "get_captures"):
            raise ValueError(
                "this grammar has captures, which need llguidance 1.7 or later: pip install 'llguidance>=1.7,<2'"
            )
        self._matcher = matcher
        self._end_token = end_token
        self._bytes = TokenBytes.of(tokenizer)

    def read(self, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, list[Capture]]:
        """The captures of generated `tokens`, in their order, by name. A part that the text was cut in is none."""
        matcher, ends, parts = self._matcher.deep_copy(), [0], []
        text, num_known = b"", 0
        for number, token in enumerate(tokens):
            if matcher.try_consume_tokens([token]) != 1:
                break
            text += self._bytes[token]
            ends.append(len(text))
            found = matcher.get_captures()
            parts += [(number, part) for part in found[num_known:]]
            num_known = len(found)
        if matcher.is_accepting() and not matcher.is_stopped():
            matcher.try_consume_tokens([self._end_token])
            parts += [(len(ends) - 1, part) for part in matcher.get_captures()[num_known:]]
        captures: dict[str, list[Capture]] = {}
        for number, (name, value) in parts:
            place = _place_of(value, text, ends[number])
            span = _tokens_of(place, place + len(value), ends) if place >= 0 else range(0)
            logprob = sum(logprobs[index].logprob for index in span if index < len(logprobs))
            captures.setdefault(name, []).append(Capture(name, value.decode("utf-8", "replace"), span, logprob))
        return captures


def has_captures(grammar: Grammar) -> bool:
    """Whether a rule of the grammar asks for a capture."""
    return grammar.kind in ("lark", "llguidance") and _CAPTURE.search(grammar.source) is not None


def _place_of(value: bytes, text: bytes, known_from: int) -> int:
    """Where a capture begins that became known with the token that begins at `known_from`. It was not over before that
    token, so that it ends there or in the token; earlier only where a stop text, which is no part of it, came between."""
    place = text.find(value, max(0, known_from - len(value)))
    return place if place >= 0 else text.rfind(value, 0, known_from)


def _tokens_of(begin: int, end: int, ends: list[int]) -> range:
    """The tokens that hold bytes `begin .. end - 1`; `ends[i]` is the number of bytes before token i."""
    return range(bisect_right(ends, begin) - 1, bisect_left(ends, end)) if end > begin else range(0)
