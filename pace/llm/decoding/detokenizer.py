"""Tokens to text, piece by piece: the pieces joined are exactly the text of all tokens decoded at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
"""What a decoder puts for bytes that are not (yet) a character."""
BASE_CLASSES = ("pace.tokenizer.tokenizer", "transformers.tokenization_utils")
"""Modules of the tokenizers that a model's own may derive from, and change."""


def decode(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    """The text of tokens, without the cleaning of spaces that would change it afterwards."""
    if not tokens:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def without_end(text: str, prompt_end: str) -> str:
    """What comes after the end of the prompt, with which a text begins; "" while it is not all there. Tokenizers of
    SentencePiece leave out the blank that a text begins with."""
    if text.startswith(prompt_end):
        return text[len(prompt_end) :]
    begins = prompt_end.startswith(" ") and text.startswith(prompt_end[1:])
    return text[len(prompt_end) - 1 :] if begins else ""


def decoder_of(tokenizer: Any, skip_special_tokens: bool = True) -> Callable[[list[int]], str]:
    """`decode` of one tokenizer, with or without special tokens. Where transformers does no more than to call the tokenizers package, that is called
    itself: a stream decodes twice for every token, and what is around it takes several times as long."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    methods = [getattr(type(tokenizer), name) for name in ("decode", "_decode") if hasattr(type(tokenizer), name)]
    if backend is not None and all(method.__module__.startswith(BASE_CLASSES) for method in methods):
        return lambda tokens: backend.decode(tokens, skip_special_tokens=skip_special_tokens)
    return lambda tokens: decode(tokenizer, tokens, skip_special_tokens)


class Detokenizer:
    """Follows one sequence of tokens; `text` only grows.

    A new token is decoded together with those of the piece before it, so that a space that belongs to it is kept, and a
    character is held back until all of its bytes are there. What cannot become a character stays a replacement
    character, given out once a later token ends it, or by `flush`.

    Tokens that stand for one byte, `<0x0A>`, are held back as long as they follow each other: where one of a run is no
    part of a character, such tokenizers replace the whole run. (sentencepiece with byte fallback: Llama 2, Mistral.)
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, prompt_end: str = "") -> None:
        """`prompt_end` is what the first tokens say again of the prompt: it is in no text given out."""
        self.tokenizer = tokenizer
        self._prompt_end = prompt_end
        self._decode = decoder_of(tokenizer, skip_special_tokens)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()) if skip_special_tokens else ())
        self._state = _Followed("", [], 0, 0)  # replaced as a whole: a push that is broken off has not been

    @property
    def text(self) -> str:
        """All pieces given out so far."""
        return without_end(self._state.text, self._prompt_end) if self._prompt_end else self._state.text

    @property
    def num_pushed(self) -> int:
        """Tokens taken so far."""
        return self._state.num_pushed

    def fork(self) -> Detokenizer:
        """A second one that has followed the same tokens."""
        return copy.copy(self)

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is now certain, maybe "". An error or Ctrl-C leaves it as it was."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """Takes several tokens, of which there is at least one, at the cost of one; what they return joined."""
        if not self._prompt_end:
            return self._extend(tokens)
        before = len(self.text)
        self._extend(tokens)
        return self.text[before:]

    def _extend(self, tokens: list[int]) -> str:
        state, last = self._state, tokens[-1]
        held = _Followed(state.text, [*state.tokens, *tokens], state.num_given, state.num_pushed + len(tokens))
        piece = ""
        if last not in self._special and not self._is_byte(last):
            piece = self._pending_of(held)
        certain = bool(piece) and not piece.endswith(REPLACEMENT)
        self._state = held.given(piece) if certain else held
        return piece if certain else ""

    def flush(self) -> str:
        """Returns what is held back, complete or not. The next token starts afresh."""
        piece = self.pending
        self._state = self._state.given(self._pending_of(self._state))
        return piece

    @property
    def pending(self) -> str:
        """Text of the tokens not yet in `text`; its end may still change."""
        pending = self._pending_of(self._state)
        if not self._prompt_end:
            return pending
        return without_end(self._state.text + pending, self._prompt_end)[len(self.text) :]

    def _pending_of(self, state: _Followed) -> str:
        before = self._decode(state.tokens[: state.num_given]) if state.num_given else ""
        return self._decode(state.tokens)[len(before) :] if state.tokens else ""

    def _is_byte(self, token: int) -> bool:
        name = self.tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and len(name) == 6 and name.startswith("<0x") and name.endswith(">")


class _Followed(NamedTuple):
    """How far a `Detokenizer` has come."""

    text: str
    tokens: list[int]
    """Of the last piece and of what is held back."""
    num_given: int
    """How many of them are in `text`."""
    num_pushed: int

    def given(self, piece: str) -> _Followed:
        """After `piece`, the text of all that was held back, is given out."""
        tokens = self.tokens[self.num_given :]
        return _Followed(self.text + piece, tokens, len(tokens), self.num_pushed)


def find_stop(text: str, stop_strings: list[str]) -> int | None:
    """Where the first of the strings begins in `text`, or None."""
    return min((index for index in (text.find(stop) for stop in stop_strings) if index >= 0), default=None)


class TextPieces:
    """Tokens of one sequence in, text to show out: no half characters, and nothing of a stop string or after it.

    Text that may turn out to be the start of a stop string is held back until it is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: list[str] | None = None,
        skip_special_tokens: bool = True,
        prompt_end: str = "",
    ) -> None:
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens, prompt_end)
        self.stop_strings = stop_strings or []
        self._held = ""
        self._stopped = False

    def push(self, token: int) -> str:
        """The text that this token makes certain, maybe ""."""
        return self.release(self.detokenize([token]))

    def flush(self) -> str:
        """The rest, at the end of the sequence."""
        return self.release(self.detokenize_rest(), ended=True)

    def detokenize(self, tokens: list[int]) -> str:
        """Text of these tokens and those before them that is certain but for stop strings: the first half of `push`."""
        return self.detokenizer.extend(tokens)

    def detokenize_rest(self) -> str:
        """The first half of `flush`."""
        return self.detokenizer.flush()

    def release(self, piece: str, ended: bool = False) -> str:
        """The second half: what of the text so far may be shown."""
        if not self.stop_strings:
            return piece
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
