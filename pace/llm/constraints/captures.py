"""Captures: named parts of a generated text, defined by its grammar."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import Any

from pace.grammar import Grammar
from pace.llm.outputs import Capture
from pace.llm.sequence import TokenLogprob
from pace.llm.text.token_bytes import TokenBytes

_CAPTURE = re.compile(r"\[[^\]\n]*\bcapture\b")


class CaptureReader:
    """Finds the captures of a finished text by reading it again, token by token."""

    def __init__(self, matcher: Any, table: Any, tokenizer: Any) -> None:
        """`matcher` is an `LLMatcher` at its start, to be copied, and `table` the `LLTokenizer` it was made with.
        Raises ValueError if llguidance is too old for captures."""
        if not hasattr(matcher, "get_captures"):
            raise ValueError(
                "this grammar has captures, which need llguidance 1.7 or later: pip install 'llguidance>=1.7,<2'"
            )
        self._matcher = matcher
        self._table = table
        self._end_token = table.eos_token
        self._bytes = TokenBytes.of(tokenizer)

    def read(self, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, list[Capture]]:
        """Returns the captures of generated `tokens` by name, in order. A capture that is cut off is not included."""
        matcher, ends, parts = self._matcher.deep_copy(), [0], []
        text, num_known = b"", 0
        for token in tokens:
            before = matcher.deep_copy()
            if matcher.try_consume_tokens([token]) != 1:
                break
            found = matcher.get_captures()
            for index in range(num_known, len(found)):
                parts.append((len(text) + self._num_bytes_until(before, token, index), found[index]))
            num_known = len(found)
            text += self._bytes[token]
            ends.append(len(text))
        if matcher.is_accepting() and not matcher.is_stopped():
            matcher.try_consume_tokens([self._end_token])
            parts += [(len(text), part) for part in matcher.get_captures()[num_known:]]
        captures: dict[str, list[Capture]] = {}
        for known_at, (name, value) in parts:
            place = _place_of(value, text, known_at)
            span = _tokens_of(place, place + len(value), ends) if place >= 0 else range(0)
            logprob = sum(logprobs[index].logprob for index in span if index < len(logprobs))
            captures.setdefault(name, []).append(Capture(name, value.decode("utf-8", "replace"), span, logprob))
        return captures

    def _num_bytes_until(self, before: Any, token: int, index: int) -> int:
        """Returns the number of bytes of a token after which the capture with that index is known. Returns all of them
        if the vocabulary lacks a single-byte token."""
        matcher, data = before.deep_copy(), self._bytes[token]
        for count, byte in enumerate(data, 1):
            single = self._single(byte)
            if single is None or matcher.try_consume_tokens([single]) != 1:
                break
            if len(matcher.get_captures()) > index:
                return count
        return len(data)

    def _single(self, byte: int) -> int | None:
        tokens = self._table.tokenize_bytes(bytes([byte]))
        return tokens[0] if len(tokens) == 1 else None


def has_captures(grammar: Grammar) -> bool:
    """True if a rule of the grammar asks for a capture."""
    return grammar.kind in ("lark", "llguidance") and _CAPTURE.search(grammar.source) is not None


def _place_of(value: bytes, text: bytes, known_at: int) -> int:
    """Returns the start of a capture that became known with the byte before `known_at`. It ends with that byte, or
    before it: the byte may only show that it was over, or text that ends it came between."""
    return text.rfind(value, 0, known_at)


def _tokens_of(begin: int, end: int, ends: list[int]) -> range:
    """Returns the tokens that hold bytes `begin .. end - 1`; `ends[i]` is the number of bytes before token i."""
    return range(bisect_right(ends, begin) - 1, bisect_left(ends, end)) if end > begin else range(0)
