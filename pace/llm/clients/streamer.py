"""Streamers, which receive tokens as they are generated, through `put` and `end`: pace's and those of transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor

from pace import env
from pace.llm.clients.token_log import TokenEvent
from pace.llm.configs import SamplingConfig
from pace.llm.sequence import PLAIN_TEXT, TextRules, TokenLogprob
from pace.llm.text.detokenizer import context_of
from pace.llm.text.reader import TextReader


class Streamer:
    """Receiver of the events of one call, on the thread of the call. This one ignores them."""

    wants_tokens = False
    """False if only the ends of rows matter. The engine then wakes no thread for a token."""
    takes_batches = True

    def on_start(self, prompts: list[list[int]]) -> bool | None:
        """Receives all prompts. Returning False cancels the call."""

    def on_event(self, event: TokenEvent) -> bool | None:
        """Receives a token, a rollback or the end of a row. Returning False for a token cancels the row."""

    def end(self) -> None:
        """Called once after all rows have ended, and after an error."""


class BaseStreamer(Streamer):
    """Receives one sequence's tokens as they are generated. `put` gets the prompt first, `[1, S]`, then each generated
    token, `[1]`. `end` comes last. An exception from either ends the generation and reaches its caller. A `put` that
    returns False cancels it."""

    wants_tokens = True
    takes_batches = False
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
            f"{type(self).__name__} must define take_back(num_tokens): a step_callback removed {num_tokens} tokens"
        )

    def on_start(self, prompts: list[list[int]]) -> bool | None:
        return self.put(torch.tensor(prompts, dtype=torch.int64))

    def on_event(self, event: TokenEvent) -> bool | None:
        if event.num_removed:
            self.take_back(event.num_removed)
        return None if event.token is None else self.put(torch.tensor([event.token], dtype=torch.int64))


class TransformersStreamer(BaseStreamer):
    """Adapter for a streamer that only has `put` and `end`, as in transformers."""

    def __init__(self, streamer: Any) -> None:
        self.put = streamer.put
        self.end = streamer.end
        self._streamer = streamer

    def take_back(self, num_tokens: int) -> None:
        if not callable(getattr(self._streamer, "take_back", None)):
            raise ValueError(
                f"a step_callback removed {num_tokens} tokens, but {type(self._streamer).__name__} has no "
                f"take_back(num_tokens); define it"
            )
        self._streamer.take_back(num_tokens)


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
        self._text = TextReader(self.tokenizer, config.stop_strings)
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
            self._text = TextReader(self.tokenizer, self._text.strings, rules)
            text = "" if self.skip_prompt else TextReader(self.tokenizer).text_of(tokens) + rules.prompt_end
        else:
            text = "".join([self._text.push(token) for token in tokens])
        if text:
            self.on_text(text)

    def end(self) -> None:
        self.on_text(self._text.flush(), stream_end=True)

    def take_back(self, num_tokens: int) -> None:
        """Starts the text again on the next line, since written text cannot be removed."""
        self._text.rollback(num_tokens)
        self.on_text("\n" + self._text.shown)

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

    @classmethod
    def of(cls, event: TokenEvent, text: TextReader) -> StreamEvent:
        """Returns an event with the text that it adds or removes. `text` has read the row's events before it."""
        if event.token is not None:
            return cls(event.row, event.token, text.push(event.token), logprob=event.logprob)
        if event.num_removed:
            num_chars = text.rollback(event.num_removed)
            return cls(event.row, None, "", num_taken_back=event.num_removed, num_chars_taken_back=num_chars)
        return cls(event.row, None, text.flush(), event.finish_reason)


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

    takes_batches = True

    def __init__(self, callback: Callable[[StreamEvent], bool | None], tokenizer: Any = None) -> None:
        if not callable(callback):
            raise TypeError(f"callback must be a callable that takes a StreamEvent, got {callback!r}")
        self.callback = callback
        self.tokenizer = tokenizer
        self.begin(SamplingConfig())

    def begin(self, config: SamplingConfig) -> None:
        self._texts: dict[int, TextReader] = {}
        self._stop_strings = config.stop_strings

    def on_start(self, prompts: list[list[int]]) -> None:
        pass

    def on_event(self, event: TokenEvent) -> bool | None:
        text = self._texts.get(event.row)
        if text is None:
            rules = self.text_rules[event.row] if self.text_rules else PLAIN_TEXT
            text = self._texts[event.row] = TextReader(self.tokenizer, self._stop_strings, rules)
        if event.finish_reason is not None:
            del self._texts[event.row]
        return self.callback(StreamEvent.of(event, text))

    def end(self) -> None:
        pass


class ProgressBar(Streamer):
    """Shows a progress bar of finished rows on stderr, once a call takes longer than a second."""

    def on_start(self, prompts: list[list[int]]) -> None:
        from tqdm import tqdm

        self.num_tokens = 0
        self.bar = tqdm(total=len(prompts), desc="generate", unit="row", leave=False, delay=1.0)

    def on_event(self, event: TokenEvent) -> None:
        self.num_tokens += event.num_tokens
        self.bar.set_postfix_str(f"{self.num_tokens} tokens", refresh=False)
        self.bar.update(1)

    def end(self) -> None:
        self.bar.close()


def make_streamer(
    streamer: Any, config: SamplingConfig, num_rows: int, progress: bool = False, rules: list[TextRules] | None = None
) -> Streamer:
    """Returns the receiver of a call's events: a streamer of pace, which gets the text `rules` of the rows, or an
    adapter. Without a streamer, returns a progress bar for several rows if `progress` is set and stderr is a terminal.
    Raises TypeError for an invalid streamer. Raises ValueError for a streamer of one sequence and several rows, or with
    beams."""
    if streamer is None:
        return ProgressBar() if progress and num_rows > 1 and env.shows_bars() else Streamer()
    if config.num_beams > 1:
        raise ValueError(
            f"a streamer needs num_beams=1, got num_beams={config.num_beams}: beam search has no certain token before "
            f"it ends"
        )
    if isinstance(streamer, BaseStreamer):
        streamer.text_rules = rules or []
        streamer.begin(config)
        receiver = streamer
    elif callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None)):
        receiver = TransformersStreamer(streamer)
    else:
        raise TypeError(
            f"a streamer needs put(tokens) and end(), got {streamer!r}; pace.llm.CallbackStreamer makes one from a "
            f"function"
        )
    if num_rows > 1 and not receiver.takes_batches:
        raise ValueError(
            f"{type(streamer).__name__} streams one sequence, but this call makes {num_rows}; use "
            f"pace.llm.CallbackStreamer, or generate one at a time"
        )
    return receiver
