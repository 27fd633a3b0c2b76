"""Assigns each part of a text to the token that produced it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from pace.llm.sequence import TokenLogprob
from pace.llm.text.token_bytes import TokenBytes


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """A token and the text it adds."""

    token: int
    text: str
    data: bytes
    """Bytes of the token, even if they are no whole character."""
    logprob: TokenLogprob | None = None
    is_end: bool = False
    """True for a token that ended its row and shows no text."""

    def as_end(self) -> TokenPiece:
        return replace(self, is_end=True)


class TokenTexts:
    """Follows a row's tokens and returns each with its text. The joined texts are the shown text.

    If several tokens form one character, the last of them gets its text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._bytes = TokenBytes.of(tokenizer)
        self._open: list[tuple[int, TokenLogprob | None]] = []
        """Tokens whose text is not certain yet."""
        self._ready: deque[tuple[int, TokenPiece]] = deque()
        """Start of each in the text, and the token."""
        self._length = 0
        self._num_shown = 0

    def push(self, token: int, logprob: TokenLogprob | None, given: str) -> None:
        """Takes a token, and the text that the detokenizer returned for it and those before it; "" while it returns
        none."""
        self._open.append((token, logprob))
        if given:
            self._settle(given)

    def close(self, given: str) -> None:
        """Takes the text that the detokenizer still held at the end."""
        if self._open:
            self._settle(given)

    def take(self, num_shown: int, is_last: bool) -> list[TokenPiece]:
        """Returns the tokens of the next `num_shown` characters. In the last call no text follows: the rest was cut off
        with a stop string."""
        self._num_shown += num_shown
        pieces = []
        while self._ready:
            start, piece = self._ready[0]
            end = start + len(piece.text)
            if end > self._num_shown:
                if not is_last or start >= self._num_shown:
                    break
                piece = _cut(piece, self._num_shown - start)
            self._ready.popleft()
            pieces.append(piece)
        return pieces

    def _settle(self, given: str) -> None:
        *first, (token, logprob) = self._open
        self._open = []
        for earlier, its_logprob in first:
            self._ready.append((self._length, TokenPiece(earlier, "", self._bytes[earlier], its_logprob)))
        data = self._bytes[token] if first or not given else given.encode("utf-8", "replace")
        self._ready.append((self._length, TokenPiece(token, given, data, logprob)))
        self._length += len(given)


def with_texts(entries: list[TokenLogprob | None], tokenizer: Any) -> list[TokenLogprob | None]:
    """Returns the same entries, with the texts of their tokens if there is a tokenizer."""
    if tokenizer is None:
        return list(entries)
    text = TokenBytes.of(tokenizer).text
    return [
        entry and replace(entry, text=text(entry.token), top_texts=tuple(text(token) for token, _ in entry.top))
        for entry in entries
    ]


def _cut(piece: TokenPiece, length: int) -> TokenPiece:
    """Returns the piece with the first `length` characters of its text, and without the bytes of the others."""
    num_cut = len(piece.text[length:].encode("utf-8", "replace"))
    return replace(piece, text=piece.text[:length], data=piece.data[: max(0, len(piece.data) - num_cut)])
