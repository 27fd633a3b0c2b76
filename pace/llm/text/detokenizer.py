"""Detokenizer: turns tokens into text piece by piece. The joined pieces are exactly the text of all tokens decoded at
once."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable
from os.path import commonprefix
from typing import Any, NamedTuple

from pace.llm.sequence import PLAIN_TEXT, TextRules
from pace.llm.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"
"""Character that a decoder puts for bytes that are not (yet) a character."""
BASE_CLASSES = ("pace.tokenizer.tokenizer", "transformers.tokenization_utils")
"""Modules of the base tokenizers, which a model's own may subclass and change."""


def decode(tokenizer: Any, tokens: list[int], skip_special_tokens: bool = True) -> str:
    """Returns the text of tokens, without the usual cleanup of spaces."""
    if not tokens:
        return ""
    return tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def decoder_of(tokenizer: Any, skip_special_tokens: bool = True) -> Callable[[list[int]], str]:
    """Returns `decode` for one tokenizer, with or without special tokens. It calls the tokenizers package directly if
    the tokenizer's own method adds nothing. A stream decodes twice for each token, and that method costs several times
    as much."""
    if tokenizer is None:
        return lambda tokens: ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    methods = [getattr(type(tokenizer), name) for name in ("decode", "_decode") if hasattr(type(tokenizer), name)]
    if backend is not None and all(method.__module__.startswith(BASE_CLASSES) for method in methods):
        return lambda tokens: backend.decode(tokens, skip_special_tokens=skip_special_tokens)
    return lambda tokens: decode(tokenizer, tokens, skip_special_tokens)


class Detokenizer:
    """Follows one sequence of tokens; `text` only grows.

    A new token is decoded together with those of the piece before it, to keep a space that belongs to it. A character
    is held back until all of its bytes are there. Invalid bytes become a replacement character, returned once a later
    token ends it, or by `flush`.

    Tokens of a single byte, `<0x0A>`, are held back as long as they follow each other. If one byte of such a run is no
    part of a character, these tokenizers replace the whole run. (sentencepiece with byte fallback: Llama 2, Mistral.)
    """

    def __init__(self, tokenizer: Any, rules: TextRules = PLAIN_TEXT) -> None:
        self.tokenizer = tokenizer
        self.rules = rules
        self._decode = decoder_of(tokenizer, skip_special_tokens=rules.hidden is None)
        self._table = TokenBytes.of(tokenizer)
        self._hidden = hidden_tokens(tokenizer, rules)
        context = list(rules.context)
        # Replaced as a whole, so an interrupted push has no effect.
        self._state = _Followed("", context, len(context), 0, rules.prompt_end)

    @property
    def text(self) -> str:
        """All pieces returned so far."""
        return self._state.text

    @property
    def num_pushed(self) -> int:
        """Number of tokens taken so far."""
        return self._state.num_pushed

    def fork(self) -> Detokenizer:
        """Returns a second one that has followed the same tokens."""
        return copy.copy(self)

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is now certain, which may be "". An error or Ctrl-C leaves the state
        unchanged."""
        return self.extend([token])

    def extend(self, tokens: list[int]) -> str:
        """Takes several tokens at the cost of one. Returns the joined results of `push` for each."""
        held, last = self._holding(tokens), tokens[-1]
        text = "" if last in self._hidden or self._table.is_byte(last) else self._held_text(held)
        if not text or text.endswith(REPLACEMENT):
            self._state = held
            return ""
        return self._give(held, text)

    def flush(self) -> str:
        """Returns the text held back, complete or not. The next token starts afresh."""
        return self._give(self._state, self._held_text(self._state))

    @property
    def pending(self) -> str:
        """Text of the tokens not yet in `text`; its end may still change."""
        return self._pending_of(self._state)

    def text_after(self, tokens: list[int]) -> str:
        """Returns all text so far and that of `tokens`, complete or not. Changes nothing."""
        return self.text + self._pending_of(self._holding(tokens))

    def _holding(self, tokens: list[int]) -> _Followed:
        state, shown = self._state, tokens
        if self.rules.hidden:
            shown = [token for token in tokens if token not in self.rules.hidden]
        num_pushed = state.num_pushed + len(tokens)
        return _Followed(state.text, [*state.tokens, *shown], state.num_given, num_pushed, state.left)

    def _give(self, held: _Followed, text: str) -> str:
        """Returns the new piece of `text`, the text of all tokens held back, and updates the state."""
        piece, left = self._beyond_prompt(text, held.left)
        tokens = held.tokens[held.num_given :]
        self._state = _Followed(held.text + piece, tokens, len(tokens), held.num_pushed, left)
        return piece

    def _pending_of(self, state: _Followed) -> str:
        return self._beyond_prompt(self._held_text(state), state.left)[0]

    def _held_text(self, state: _Followed) -> str:
        """Returns the text of the tokens held back, including the end of the prompt."""
        if len(state.tokens) == state.num_given:
            return ""
        before = self._decode(state.tokens[: state.num_given]) if state.num_given else ""
        text = self._decode(state.tokens) if state.tokens else ""
        return _beyond(before, text)

    def _beyond_prompt(self, text: str, left: str) -> tuple[str, str]:
        """Returns `text` without the prompt's end, and what is left of that. `left` is the part of it still to come."""
        if not left or not text:
            return text, left
        is_first = not self.rules.context and left == self.rules.prompt_end
        if is_first and left.startswith(" ") and not text.startswith(" "):  # SentencePiece has omitted the blank
            left = left[1:]
        beyond = _beyond(left, text)
        return beyond, "" if beyond else left[len(text) :]


class _Followed(NamedTuple):
    """State of a `Detokenizer`."""

    text: str
    tokens: list[int]
    """Tokens of the last piece and those held back."""
    num_given: int
    """Number of these tokens that are in `text` or in the prompt."""
    num_pushed: int
    left: str
    """Part of the prompt's end that the tokens in `text` have not repeated yet."""


def _beyond(before: str, text: str) -> str:
    """Returns the part of `text` after `before`, its beginning. An incomplete character at the end of `before` may
    differ."""
    return text[len(before if text.startswith(before) else commonprefix([before, text])) :]


def decode_after(tokenizer: Any, tokens: list[int], rules: TextRules) -> str:
    """Returns the text of all generated tokens at once."""
    return Detokenizer(tokenizer, rules).text_after(tokens)


def hidden_tokens(tokenizer: Any, rules: TextRules) -> frozenset[int]:
    """Returns the tokens that are no text."""
    return TokenBytes.of(tokenizer).special if rules.hidden is None else rules.hidden


def context_of(prompt: list[int], tokenizer: Any) -> tuple[int, ...]:
    """Returns `TextRules.context` for the text that continues a prompt: a few tokens, regardless of the prompt's
    length.

    The first is a token with text, after which the tokenizer keeps a blank. Tokens of a character that the prompt cuts
    off follow. The first is no single-byte token, since bytes of the continuation may join its run. If such a run is no
    text, the decoder replaces all of it, so all of it is needed. A prompt of special tokens has no context.
    """
    table = TokenBytes.of(tokenizer)
    num_open = _num_open(prompt, table)
    whole, first, run = prompt[: len(prompt) - num_open], [], []
    for token in reversed(whole):
        if token in table.special or not table[token]:
            continue
        if not table.is_byte(token):
            first = [token]
            break
        run.append(token)
    run.reverse()
    try:
        text = b"".join([table[token] for token in run]).decode()
        run = run[len(run) - len(text[-1:].encode()) :] if not first else []
    except UnicodeDecodeError:
        pass
    return (*first, *run, *prompt[len(whole) :])


def _num_open(prompt: list[int], table: TokenBytes) -> int:
    """Returns how many of the last tokens hold bytes of an incomplete character."""
    parts: list[bytes] = []
    for token in reversed(prompt[-4:]):  # the maximum number of bytes of a character
        if token in table.special:
            break
        parts.append(table[token])
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(reversed(parts)))
    num_bytes, count = len(decoder.getstate()[0]), 0
    while num_bytes > 0:
        num_bytes -= len(parts[count])
        count += 1
    return count
