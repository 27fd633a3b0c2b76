"""Token healing: continues a prompt that ends within a token of the vocabulary.

After the tokens `http` `:` the text continues with `//`, but the model has only ever seen `://` there. So tokens are
removed from the prompt's end as long as a longer token begins with their text. They are generated again, from the
tokens that agree with the text.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pace.llm.constraints.masks import TokenMask, fill_bits
from pace.llm.text.token_bytes import TokenBytes


@dataclass(frozen=True)
class HealedPrompt:
    """A prompt without its last tokens, and their text."""

    tokens: list[int]
    end: str
    """Text that the first generated tokens repeat; "" if nothing was removed."""


class PromptHealer:
    """The vocabulary of one tokenizer sorted by the tokens' bytes, without special tokens."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """`vocab_size` is the model's. Takes some tenths of a second for a large vocabulary."""
        self._bytes = TokenBytes.of(tokenizer)
        self._special = frozenset(tokenizer.all_special_ids)
        tokens = (token for token in range(min(vocab_size, len(tokenizer))) if token not in self._special)
        entries = sorted((self._bytes[token], token) for token in tokens if self._bytes[token])
        self._texts = [text for text, _ in entries]
        self._tokens = np.array([token for _, token in entries], np.int64)
        self._longest = max(map(len, self._texts), default=0)

    def heal(self, tokens: list[int]) -> HealedPrompt:
        """Removes the longest end of a prompt that begins a single longer token; at least one token stays."""
        text, best = b"", HealedPrompt(tokens, "")
        for count in range(1, len(tokens)):
            token = tokens[-count]
            if token in self._special or not self._bytes[token]:
                break
            text = self._bytes[token] + text
            if len(text) >= self._longest:
                break
            if self._has_longer(text) and (end := _decoded(text)):
                best = HealedPrompt(tokens[:-count], end)
        return best

    def bytes_of(self, token: int) -> bytes:
        return self._bytes[token]

    def is_special(self, token: int) -> bool:
        return token in self._special

    def agreeing(self, text: bytes) -> np.ndarray:
        """Returns int64 tokens that begin with `text`, and those that it begins with."""
        first, last = self._range(text)
        shorter = [self._range(text[:length], exact=True) for length in range(1, len(text))]
        return np.concatenate([self._tokens[first:last], *(self._tokens[begin:end] for begin, end in shorter)])

    def _has_longer(self, text: bytes) -> bool:
        first, last = self._range(text)
        return self._range(text, exact=True)[1] < last

    def _range(self, text: bytes, exact: bool = False) -> tuple[int, int]:
        """Returns the range of the tokens that begin with `text`, or equal it if `exact`."""
        first = bisect_left(self._texts, text)
        after = text + b"\0" if exact else text + b"\xff" * self._longest
        return first, bisect_left(self._texts, after, first)


class HealingMask(TokenMask):
    """Allows tokens that repeat the prompt's removed end and may go beyond it; after that, every token."""

    def __init__(self, healer: PromptHealer, end: str) -> None:
        self._healer = healer
        self._left = [end.encode()]
        """Text still to be repeated, at the start and after each token up to the one that completes it."""
        self._num_free = 0
        """Number of tokens after that."""

    @property
    def is_open(self) -> bool:
        return not self._left[-1]

    def fill(self, row: Tensor) -> None:
        if self._left[-1]:
            fill_bits(row, self._healer.agreeing(self._left[-1]))
        else:
            row.fill_(-1)

    def accept(self, token: int) -> None:
        if not self._left[-1]:
            self._num_free += 1
            return
        left = self._after(self._left[-1], token)
        if left is None:
            raise ValueError(f"the token {token} does not agree with the end of the prompt, {self._left[-1]!r}")
        self._left.append(left)

    def rollback(self, num_tokens: int) -> None:
        num_free = min(num_tokens, self._num_free)
        self._num_free -= num_free
        del self._left[len(self._left) - (num_tokens - num_free) :]

    def count_allowed(self, tokens: list[int]) -> int:
        left: bytes | None = self._left[-1]
        for count, token in enumerate(tokens):
            if not left:
                return len(tokens)
            left = self._after(left, token)
            if left is None:
                return count
        return len(tokens)

    def _after(self, left: bytes, token: int) -> bytes | None:
        """Returns the text left to repeat after a token; None if the token does not agree."""
        text = self._healer.bytes_of(token)
        if not text or self._healer.is_special(token):
            return None
        return left[len(text) :] if left.startswith(text) else b"" if text.startswith(left) else None


def _decoded(text: bytes) -> str:
    """Returns the decoded text; "" if it begins or ends within a character."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
