"""Rows of the engine as a connection sees them: a cursor over what came, in pieces of text.

The engine's thread writes rows (`Row` is a `TokenSink`), the event loop reads them. After a step the loop is woken once
for all rows, and then at most every REST_SECONDS: a small model makes dozens of tokens in that time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pace.llm.clients.streamer import NoPieces
from pace.llm.decoding.detokenizer import TextPieces
from pace.llm.sequence import Sequence, TokenLogprob
from pace.server.token_texts import TokenPiece, TokenTexts

REST_SECONDS = 0.008
"""As `clients/waiting.py` has it, for the same reason."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended."""

    reason: str
    """ "stop" or "length"."""
    stop: str | int | None = None
    """The stop string, or the id of the token that was given as one; None for the model's own end."""
    is_end_token: bool = False
    """True where the last token ended it, which shows no text."""


@dataclass(slots=True)
class Piece:
    """What a choice got since it was last looked at."""

    index: int
    text: str
    tokens: list[TokenPiece] = field(default_factory=list)
    """Those whose text is in `text`, in order; none where nobody asked for tokens or log-probabilities."""
    finish: Finish | None = None
    prompt: list[TokenPiece] | None = None
    """In a choice's first piece, where it was asked for: the prompt's tokens."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Wakeups:
    """Wakes the loop for rows that have something new. `notify` is called on the engine's thread, and never waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._dirty: deque[Row] = deque()
        self._is_due = False

    def notify(self, row: Row) -> None:
        if not row.is_dirty:
            row.is_dirty = True
            self._dirty.append(row)
        if not self._is_due:
            self._is_due = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: nobody reads any more
                pass

    def _deliver(self) -> None:
        """Tells each row's answer once; then the loop rests from rows for a while."""
        if not self._dirty:
            self._is_due = False
            if self._dirty:  # came between the two lines, and was not told
                self._is_due = True
                self._loop.call_soon(self._deliver)
            return
        while self._dirty:
            row = self._dirty.popleft()
            row.is_dirty = False
            row.changed()
        self._loop.call_later(REST_SECONDS, self._deliver)


class Row:
    """One sequence's tokens as they came. The engine's thread appends, and ends it; nothing is ever taken back."""

    def __init__(self, sequence: Sequence, notify: Callable[[Row], None]) -> None:
        self.sequence = sequence
        self.tokens: list[tuple[int, TokenLogprob | None]] = []
        self.is_dirty = False
        self.is_ended = False
        self.error: BaseException | None = None
        self.changed: Callable[[], None] = lambda: None
        """Called on the loop once there is something new."""
        self._notify = notify

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        self.tokens.append((token, logprob))
        self._notify(self)

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self.error = error
        self.is_ended = True
        self._notify(self)


class Cursor:
    """Reads one row as text. What may become a stop string, or is half a character, is held back with its tokens."""

    def __init__(self, index: int, row: Row, tokenizer: Any, stop_strings: list[str] | None, wants_tokens: bool):
        """Without a tokenizer texts are empty."""
        self.index = index
        self.row = row
        self.num_read = 0
        self.is_done = False
        self._pieces: TextPieces | NoPieces = NoPieces() if tokenizer is None else TextPieces(tokenizer, stop_strings)
        self._end_token = getattr(tokenizer, "eos_token_id", None)
        self._token_texts = TokenTexts(tokenizer) if wants_tokens else None

    def read(self) -> Piece | None:
        """What came since the last call; None where that is nothing to show. Raises the row's error."""
        if self.is_done:
            return None
        is_ended = self.row.is_ended  # before the tokens: those that come with the end are then there
        if is_ended and self.row.error is not None:
            self.is_done = True
            raise self.row.error
        text, finish = self._read_tokens(), None
        if is_ended:
            text += self._flush()
            self.is_done, finish = True, self._finish()
        tokens = [] if self._token_texts is None else self._token_texts.take(len(text), is_ended)
        if finish is not None and finish.is_end_token and tokens:
            tokens[-1] = tokens[-1].as_end()
        return Piece(self.index, text, tokens, finish) if text or tokens or finish is not None else None

    def _read_tokens(self) -> str:
        text, tokens = "", self.row.tokens
        while self.num_read < len(tokens):
            token, logprob = tokens[self.num_read]
            self.num_read += 1
            given = self._pieces.detokenize(token)
            text += self._pieces.release(given)
            if self._token_texts is not None:
                self._token_texts.push(token, logprob, given)
        return text

    def _flush(self) -> str:
        rest = self._pieces.detokenize_rest()
        if self._token_texts is not None:
            self._token_texts.close(rest)
        return self._pieces.release(rest, ended=True)

    def _finish(self) -> Finish:
        sequence = self.row.sequence
        if sequence.finish_reason != "stop":
            return Finish(sequence.finish_reason)
        if (matched := sequence.stopping.matched_string) is not None:
            return Finish("stop", matched)
        token = self.row.tokens[-1][0]
        return Finish("stop", None if token == self._end_token else token, is_end_token=True)
