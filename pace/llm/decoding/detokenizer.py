"""Tokens to text, piece by piece: the pieces joined are exactly the text of all tokens decoded at once."""

from __future__ import annotations

import copy
from typing import Any

REPLACEMENT = "\ufffd"
"""What a decoder puts for bytes that are not (yet) a character."""


def decode(tokenizer: Any, tokens: list[int]) -> str:
    """The text of tokens, without special tokens and without the cleaning of spaces that would change it afterwards."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False) if tokens else ""


class Detokenizer:
    """Follows one sequence of tokens; `text` only grows.

    A new token is decoded together with those of the piece before it, so that a space that belongs to it is kept, and a
    character is held back until all of its bytes are there. What cannot become a character stays a replacement
    character, given out once a later token ends it, or by `flush`.

    Tokens that stand for one byte, `<0x0A>`, are held back as long as they follow each other: where one of a run is no
    part of a character, such tokenizers replace the whole run. (sentencepiece with byte fallback: Llama 2, Mistral.)
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._tokens: list[int] = []  # of the last piece and of what is held back
        self._num_given = 0  # how many of them are in `text`

    def fork(self) -> Detokenizer:
        """A second one that has followed the same tokens."""
        twin = copy.copy(self)
        twin._tokens = list(self._tokens)
        return twin

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is now certain, maybe ""."""
        self._tokens.append(token)
        if token in self._special or self._is_byte(token):
            return ""
        piece = self.pending
        if not piece or piece.endswith(REPLACEMENT):
            return ""
        return self._give(piece)

    def flush(self) -> str:
        """Returns what is held back, complete or not. The next token starts afresh."""
        return self._give(self.pending)

    @property
    def pending(self) -> str:
        """Text of the tokens not yet in `text`; its end may still change."""
        before = decode(self.tokenizer, self._tokens[: self._num_given])
        return decode(self.tokenizer, self._tokens)[len(before) :]

    def _is_byte(self, token: int) -> bool:
        name = self.tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x") and name.endswith(">")

    def _give(self, piece: str) -> str:
        del self._tokens[: self._num_given]
        self._num_given = len(self._tokens)
        self.text += piece
        return piece


def find_stop(text: str, stop_strings: list[str]) -> int | None:
    """Where the first of the strings begins in `text`, or None."""
    return min((index for index in (text.find(stop) for stop in stop_strings) if index >= 0), default=None)


class TextPieces:
    """Tokens of one sequence in, text to show out: no half characters, and nothing of a stop string or after it.

    Text that may turn out to be the start of a stop string is held back until it is known.
    """

    def __init__(self, tokenizer: Any, stop_strings: list[str] | None = None) -> None:
        self.detokenizer = Detokenizer(tokenizer)
        self.stop_strings = stop_strings or []
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain, maybe ""."""
        return self._release(self.detokenizer.push(token), ended=False)

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        return self._release(self.detokenizer.flush(), ended=True)

    def _release(self, piece: str, ended: bool) -> str:
        if self._stopped:
            return ""
        self._held += piece
        stop = find_stop(self._held, self.stop_strings)
        if stop is not None:
            self._stopped = True
            return self._held[:stop]
        num_certain = len(self._held) if ended else len(self._held) - self._possible_start()
        certain, self._held = self._held[:num_certain], self._held[num_certain:]
        return certain

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self.stop_strings), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self.stop_strings):
                return length
        return 0
