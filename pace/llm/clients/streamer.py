"""Streamers, which receive tokens as they are generated, through `put` and `end`: pace's and those of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

import torch
from torch import Tensor

from pace import env
from pace.llm.configs import SamplingConfig
from pace.llm.sequence import PLAIN_TEXT, TextRules, TokenLogprob
from pace.llm.text.detokenizer import TextPieces, context_of


class BaseStreamer:
    """Receives one sequence's tokens as they are generated. `put` gets the prompt first, `[1, S]`, then each generated
    token, `[1]`. `end` comes last. An exception from either ends the generation and reaches its caller. A `put` that
    returns False cancels it."""

    text_rules: list[TextRules] = []
    """Rules for turning the tokens of each row into text. Set before `begin`; empty if `put` is called by hand."""

    def begin(self, config: SamplingConfig) -> None:
        """Called before the first `put`, with the effective config."""

    def put(self, value: Tensor) -> bool | None:
        raise NotImplementedError(f"{type(self).__name__} must define put(value)")

    def end(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define end()")

    def take_back(self, num_tokens: int) -> None:
        """Called when a step callback has rolled back the last `num_tokens` tokens that were put."""
        raise NotImplementedError(
            f"{type(self).__name__} must define take_back(num_tokens): a step_callback has taken back {num_tokens} tokens"
        )


class TextStreamer(BaseStreamer):
    """Writes text as soon as its characters are complete, without waiting for the end of a word, and a newline at the
    end.

    Subclasses may override `on_text`. Stop strings of the config, and text after them, are not written.
    """

    def __init__(self, tokenizer: Any, skip_prompt: bool = False, file: TextIO | None = None) -> None:
        """`file` defaults to the standard output."""
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.file = file
        self.begin(SamplingConfig())

    def begin(self, config: SamplingConfig) -> None:
        self._stop_strings = config.stop_strings
        self._pieces = self._shown_text(PLAIN_TEXT)
        self._prompt_is_next = True

    def put(self, value: Tensor) -> None:
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(
                f"TextStreamer takes one sequence, got a batch of {value.shape[0]}; CallbackStreamer takes any number"
            )
        tokens = value.reshape(-1).tolist()
        if self._prompt_is_next:
            self._prompt_is_next = False
            rules = self.text_rules[0] if self.text_rules else TextRules(context_of(tokens, self.tokenizer))
            self._pieces = self._shown_text(rules)
            prompt = TextPieces(self.tokenizer)
            text = "".join([prompt.push(token) for token in tokens]) + prompt.flush() + rules.prompt_end
            text = "" if self.skip_prompt else text
        else:
            text = "".join([self._pieces.push(token) for token in tokens])
        if text:
            self.on_text(text)

    def end(self) -> None:
        self.on_text(self._pieces.flush(), stream_end=True)

    def take_back(self, num_tokens: int) -> None:
        """Starts the text again on the next line, since written text cannot be removed."""
        self._pieces.take_back(num_tokens)
        self.on_text("\n" + self._pieces.text())

    def _shown_text(self, rules: TextRules) -> ShownText:
        return ShownText(lambda: TextPieces(self.tokenizer, self._stop_strings, rules))

    def on_text(self, text: str, stream_end: bool = False) -> None:
        """Takes the next piece of text. `stream_end` is set with the last, which may be empty."""
        file = self.file or sys.stdout
        file.write(text + "\n" if stream_end else text)
        file.flush()


@dataclass(frozen=True)
class StreamEvent:
    """A generated token of one row of the batch, or the end of that row."""

    row: int
    """Index into the output's rows: prompt index times num_return_sequences plus the sample's index."""
    token: int | None
    """None at the end of the row."""
    text: str
    """Text that this event makes certain. The joined texts of a row are its text in the output. "" without a
    tokenizer."""
    finish_reason: str | None = None
    """Set at the end of the row."""
    logprob: TokenLogprob | None = None
    """The token's log-probability, if the config asks for it."""
    num_taken_back: int = 0
    """Number of the row's last tokens that a step callback has rolled back. Such an event has no token, and is not the
    row's end."""
    num_chars_taken_back: int = 0
    """Number of characters of the text so far that are removed with them."""


class TextPiece(str):
    """A piece of streamed text. Remove the last `taken_back` characters of the text before it first; 0 except with step
    callbacks."""

    taken_back = 0

    @classmethod
    def of(cls, event: StreamEvent) -> TextPiece:
        piece = cls(event.text)
        piece.taken_back = event.num_chars_taken_back
        return piece


class CallbackStreamer(BaseStreamer):
    """Calls `callback(StreamEvent)` for every token of every row, for batches of any size. A callback that returns
    False cancels the row, with this token as its last."""

    wants_tokens = True

    def __init__(self, callback: Callable[[StreamEvent], bool | None], tokenizer: Any = None) -> None:
        if not callable(callback):
            raise TypeError(f"callback must be a callable that takes a StreamEvent, got {callback!r}")
        self.callback = callback
        self.tokenizer = tokenizer
        self._pieces: dict[int, ShownText] = {}
        self._stop_strings: list[str] | None = None

    def begin(self, config: SamplingConfig) -> None:
        self._pieces = {}
        self._stop_strings = config.stop_strings

    # -- -- methods of `Feed` -- --------------

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def token(self, row: int, token: int, logprob: TokenLogprob | None) -> bool | None:
        return self.callback(StreamEvent(row, token, self._row(row).push(token), logprob=logprob))

    def taken_back(self, row: int, num_tokens: int) -> None:
        num_chars = self._row(row).take_back(num_tokens)
        self.callback(StreamEvent(row, None, "", num_taken_back=num_tokens, num_chars_taken_back=num_chars))

    def finished(self, row: int, reason: str, num_tokens: int) -> None:
        self.callback(StreamEvent(row, None, self._row(row).flush(), reason))
        self._pieces.pop(row, None)

    def _row(self, row: int) -> ShownText:
        if row not in self._pieces:
            rules = self.text_rules[row] if self.text_rules else PLAIN_TEXT
            self._pieces[row] = ShownText(
                lambda: NoPieces() if self.tokenizer is None else TextPieces(self.tokenizer, self._stop_strings, rules)
            )
        return self._pieces[row]

    def end(self) -> None:
        pass


class NoPieces:
    """Empty text, if there is no tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def detokenize(self, tokens: list[int]) -> str:
        return ""

    def detokenize_rest(self) -> str:
        return ""

    def release(self, piece: str, ended: bool = False) -> str:
        return ""


class ShownText:
    """The text of one row as shown: a piece for each token, and the text to remove when tokens are rolled back."""

    def __init__(self, make_pieces: Callable[[], TextPieces | NoPieces]) -> None:
        self._make_pieces = make_pieces
        self._pieces = make_pieces()
        self._tokens: list[int] = []
        self._num_shown = 0

    def push(self, token: int) -> str:
        """Returns the text that this token makes certain, maybe ""."""
        self._tokens.append(token)
        return self._show(self._pieces.push(token))

    def flush(self) -> str:
        """Returns the rest, at the end of the row."""
        return self._show(self._pieces.flush())

    def take_back(self, num_tokens: int) -> int:
        """Drops the last tokens. Returns the number of characters that are removed with them."""
        del self._tokens[len(self._tokens) - num_tokens :]
        num_before, self._num_shown = self._num_shown, 0
        self.text()
        return num_before - self._num_shown

    def text(self) -> str:
        """Returns all certain text of the tokens so far."""
        self._pieces, self._num_shown = self._make_pieces(), 0
        return "".join([self._show(self._pieces.push(token)) for token in self._tokens])

    def _show(self, piece: str) -> str:
        self._num_shown += len(piece)
        return piece


class Feed(Protocol):
    """Receiver of a batch's events: all prompts, then tokens, rollbacks and the end of each row, then the end of all.
    `start` returns False to cancel the batch, `token` to cancel the row."""

    wants_tokens: bool
    """False if `token` does nothing. It is then not called, and the engine wakes no thread for a token."""

    def start(self, prompts: list[list[int]]) -> bool | None: ...

    def token(self, row: int, token: int, logprob: TokenLogprob | None) -> bool | None: ...

    def taken_back(self, row: int, num_tokens: int) -> None: ...

    def finished(self, row: int, reason: str, num_tokens: int) -> None: ...

    def end(self) -> None: ...


class NullFeed:
    """Feed that does nothing."""

    wants_tokens = False

    def start(self, prompts: list[list[int]]) -> None:
        pass

    def token(self, row: int, token: int, logprob: TokenLogprob | None) -> None:
        pass

    def taken_back(self, row: int, num_tokens: int) -> None:
        pass

    def finished(self, row: int, reason: str, num_tokens: int) -> None:
        pass

    def end(self) -> None:
        pass


class ProgressFeed:
    """Shows a progress bar of finished rows on stderr, once a call takes longer than a second."""

    wants_tokens = False

    def start(self, prompts: list[list[int]]) -> None:
        from tqdm import tqdm

        self.num_tokens = 0
        self.bar = tqdm(total=len(prompts), desc="generate", unit="row", leave=False, delay=1.0)

    def token(self, row: int, token: int, logprob: TokenLogprob | None) -> None:
        pass

    def taken_back(self, row: int, num_tokens: int) -> None:
        pass

    def finished(self, row: int, reason: str, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.bar.set_postfix_str(f"{self.num_tokens} tokens", refresh=False)
        self.bar.update(1)

    def end(self) -> None:
        self.bar.close()


class PutFeed:
    """Feed for streamers with `put` and `end`, as in transformers: the prompt, each token, the end."""

    wants_tokens = True

    def __init__(self, streamer: Any) -> None:
        self.streamer = streamer

    def start(self, prompts: list[list[int]]) -> bool | None:
        return self.streamer.put(torch.tensor(prompts, dtype=torch.int64))

    def token(self, row: int, token: int, logprob: TokenLogprob | None) -> bool | None:
        return self.streamer.put(torch.tensor([token], dtype=torch.int64))

    def taken_back(self, row: int, num_tokens: int) -> None:
        if not callable(getattr(self.streamer, "take_back", None)):
            raise ValueError(
                f"a step_callback has taken back {num_tokens} tokens, and {type(self.streamer).__name__} has no "
                f"take_back(num_tokens)"
            )
        self.streamer.take_back(num_tokens)

    def finished(self, row: int, reason: str, num_tokens: int) -> None:
        pass

    def end(self) -> None:
        self.streamer.end()


def make_feed(
    streamer: Any, config: SamplingConfig, num_rows: int, progress: bool = False, rules: list[TextRules] | None = None
) -> Feed:
    """Returns the feed of a streamer; one of pace's gets the text `rules` of the rows. Without a streamer, returns a
    progress bar for several rows if `progress` is set and stderr is a terminal. Raises TypeError for an invalid
    streamer. Raises ValueError for a streamer of one sequence and several rows, or with beams."""
    if streamer is None:
        return ProgressFeed() if progress and num_rows > 1 and env.shows_bars() else NullFeed()
    if config.num_beams > 1:
        raise ValueError(
            f"beam search knows no token for certain before its end: a streamer goes with num_beams=1 only, got num_beams={config.num_beams}"
        )
    if isinstance(streamer, BaseStreamer):
        streamer.text_rules = rules or []
        streamer.begin(config)
    if isinstance(streamer, CallbackStreamer):
        return streamer
    if not callable(getattr(streamer, "put", None)) or not callable(getattr(streamer, "end", None)):
        raise TypeError(
            f"a streamer has put(tokens) and end(), got {streamer!r}; pace.llm.CallbackStreamer makes one of a function"
        )
    if num_rows > 1:
        raise ValueError(
            f"{type(streamer).__name__} streams one sequence, and this call makes {num_rows}; use pace.llm.CallbackStreamer, or generate one by one"
        )
    return PutFeed(streamer)
