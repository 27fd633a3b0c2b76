"""Token mask of a grammar, using llguidance's matcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pace.llm.constraints.masks import TokenMask


class GrammarTooComplex(ValueError):
    """Error of a sequence whose grammar exceeds the work allowed for one token."""


@dataclass
class Usage:
    """Statistics of the masks of one compiled grammar, which share its lexer."""

    num_tokens: int = 0
    """Accepted tokens; the lexer grows with them."""
    has_failed: bool = False
    """True if a mask has failed, possibly because the lexer had grown too large."""


class GrammarMask(TokenMask):
    """Allows the tokens that a grammar allows. End tokens are allowed exactly where the grammar may end, regardless of
    what the grammar states about them."""

    releases_gil = True

    def __init__(
        self, matcher: Any, end_tokens: tuple[int, ...], other_ends: tuple[int, ...], usage: Usage | None = None
    ) -> None:
        """`matcher` is an `LLMatcher` at its start. `end_tokens` end a sequence. `other_ends` do not, though llguidance
        treats them as end tokens. `usage` counts the work of the mask and its forks."""
        self._matcher = matcher
        self._end_tokens = end_tokens
        self._other_ends = other_ends
        self._usage = usage or Usage()
        self._num_ends = 0
        """Accepted end tokens, which the matcher does not get."""

    @property
    def is_finished(self) -> bool:
        return self._num_ends > 0 or self._matcher.is_stopped()

    def fill(self, row: Tensor) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), 4 * len(row))
        self._check()
        words = row.numpy().view(np.uint32)
        self._mend(words)
        may_end = self._matcher.is_accepting()
        for token in self._end_tokens:
            _set_bit(words, token, may_end)
        for token in self._other_ends:
            _set_bit(words, token, False)

    def accept(self, token: int) -> None:
        self._usage.num_tokens += 1
        if self._num_ends or not self._takes(token):
            self._check()
            raise ValueError(f"the grammar does not allow the token {token} here")

    def rollback(self, num_tokens: int) -> None:
        num_ends = min(self._num_ends, num_tokens)
        self._num_ends -= num_ends
        if num_tokens > num_ends and not self._matcher.rollback(num_tokens - num_ends):
            self._check()
            raise RuntimeError(f"the grammar cannot go back {num_tokens} tokens")

    def count_allowed(self, tokens: list[int]) -> int:
        if self._num_ends:
            return 0
        return self._matcher.validate_tokens(self._before_end(tokens))

    def forced(self) -> list[int]:
        """Returns the tokens that must follow. The matcher tokenizes text as the tokenizer does, so the name of a
        special token in a string becomes that token. The grammar does not accept it as text, so the result ends before
        it."""
        tokens = [] if self.is_finished else self._before_end(self._matcher.compute_ff_tokens())
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else []

    def fork(self) -> GrammarMask:
        twin = GrammarMask(self._matcher.deep_copy(), self._end_tokens, self._other_ends, self._usage)
        twin._num_ends = self._num_ends
        return twin

    def _mend(self, words: np.ndarray) -> None:
        """Corrects a mask whose only token is one that the matcher rejects: a special token's name in a string (see
        `forced`). Asks the matcher for each token of the vocabulary; such places are rare."""
        if np.count_nonzero(words) != 1:
            return
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        only = int(allowed[0])
        if len(allowed) > 1 or only in self._end_tokens + self._other_ends or self._matcher.validate_tokens([only]):
            return
        for token in range(32 * len(words)):
            _set_bit(words, token, token != only and self._matcher.validate_tokens([token]) == 1)

    def _takes(self, token: int) -> bool:
        """Accepts a token if it is allowed, and returns True if so."""
        if token not in self._end_tokens:
            return self._matcher.try_consume_tokens([token]) == 1
        may_end = self._matcher.is_accepting()
        self._num_ends += may_end
        return may_end

    def _before_end(self, tokens: list[int]) -> list[int]:
        return tokens[: next((index for index, token in enumerate(tokens) if token in self._end_tokens), len(tokens))]

    def _check(self) -> None:
        """Raises GrammarTooComplex if the matcher has given up: its work for one token is bounded."""
        if self._matcher.is_error():
            self._usage.has_failed = True
            raise GrammarTooComplex(
                f"the grammar is too complex to go on with: {first_line(self._matcher.get_error())}"
            )


def first_line(error: str) -> str:
    """Returns llguidance's error message without the state of its parser."""
    return error.strip().split("\n<", 1)[0].strip()[:500]


def _set_bit(words: np.ndarray, token: int, value: bool) -> None:
    bit = np.uint32(1 << (token & 31))
    if value:
        words[token >> 5] |= bit
    else:
        words[token >> 5] &= ~bit
