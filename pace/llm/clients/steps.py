"""Step callbacks: the caller inspects a text during generation, and may stop it or replace its end.

A sequence that reaches a step point, a number of tokens or a string, is parked before the engine's next step. The
callback runs on its own thread, so that other sequences continue meanwhile. Its answer is applied between two steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pace.llm.constraints.captures import CaptureReader
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.outputs import Capture
from pace.llm.sequence import NULL_SINK, Sequence, TokenLogprob, TokenSink
from pace.llm.text.detokenizer import REPLACEMENT, decode_after
from pace.llm.text.reader import find_first
from pace.llm.text.token_bytes import TokenBytes


@dataclass(frozen=True)
class StepContext:
    """Argument of a step callback: the text so far."""

    row: int
    """Index into the output's rows."""
    token_ids: list[int]
    """All generated tokens."""
    num_new_tokens: int
    """Number of tokens since the last call, without those inserted by that call."""
    text: str
    """All generated text, without an incomplete character at the end."""
    string: str | None
    """The one of `step_strings` that was found and ends this step; None if the step ends because of `step_every`."""
    num_string_tokens: int
    """Number of last tokens that contain that string; 0 without one."""
    text_before_string: str
    """Text of these tokens before the string. Rolling the tokens back removes it, too."""
    captures: dict[str, list[Capture]] = field(default_factory=dict)
    """Captures of the grammar so far."""


@dataclass(frozen=True)
class StepFeedback:
    """Answer of a step callback. Returning None continues the generation."""

    stop: bool = False
    """End here, with the finish reason "stop", after `text`."""
    take_back: int = 0
    """Number of last generated tokens to remove."""
    text: str = ""
    """Text to insert after that, as if the model had generated it. If there is a grammar, it must allow the text."""

    def __post_init__(self) -> None:
        for name, kind in (("stop", bool), ("take_back", int), ("text", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"StepFeedback: {name} must be of type {kind.__name__}, got {value!r:.100}")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"StepFeedback: text must be whole characters, got a lone surrogate at index {error.start}"
            ) from None
        if self.take_back < 0:
            raise ValueError(f"StepFeedback: take_back must be 0 or more tokens, got {self.take_back}")


@dataclass(frozen=True)
class Steps:
    """Step points of one call, and their callback."""

    callback: Callable[[StepContext], StepFeedback | None]
    every: int | None
    strings: list[str]
    tokenizer: Any
    driver: EngineDriver


class RowSteps:
    """Step points of one sequence: a sink in front of its client's sink."""

    def __init__(self, steps: Steps, row: int, captures: CaptureReader | None) -> None:
        self._steps = steps
        self._row = row
        self._captures = captures
        self._sink: TokenSink = NULL_SINK
        self._last = 0
        """Number of generated tokens at the last step point, including inserted ones."""
        self._found: str | None = None
        """The string at the current step point."""
        self._begin = 0
        """Start of the search for step strings in the text."""

    def before(self, sink: TokenSink) -> RowSteps:
        """Returns this sink, which forwards events to `sink`."""
        self._sink = sink
        return self

    # -- on the engine's thread, within a step -------------------------------------------------------------------------

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        self._sink.token(sequence, token, logprob)
        if sequence.is_finished:
            return
        self._found = self._find(sequence) if self._steps.strings else None
        every = self._steps.every
        if self._found or (every is not None and sequence.num_generated - self._last >= every):
            sequence.is_held = True
            self._steps.driver.tidy(lambda engine: self._pause(engine, sequence))

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self._sink.end(sequence, reason, error)

    def _find(self, sequence: Sequence) -> str | None:
        """Returns the step string that the last token completes."""
        text, strings = sequence.stopping.text, self._steps.strings
        text.follow(sequence)
        certain = text.certain
        found = find_first(certain[self._begin :] + text.pending, strings)
        self._begin = max(self._begin, len(certain) - max(map(len, strings)) + 1)
        return found and found[1]

    # -- on the engine's thread, between two steps ---------------------------------------------------------------------

    def _pause(self, engine: Engine, sequence: Sequence) -> None:
        if sequence.is_finished:
            return
        try:
            engine.park(sequence, sequence.num_generated)
            known = (sequence, sequence.generated, list(sequence.logprobs))
            threading.Thread(target=self._call_back, args=known, name="pace-step", daemon=True).start()
        except BaseException as error:  # an error of a mask, say
            _fail(engine, sequence, error)

    def _resume(self, engine: Engine, sequence: Sequence, feedback: StepFeedback, tokens: list[int]) -> None:
        if sequence.is_finished:
            return
        try:
            if feedback.take_back:
                engine.park(sequence, sequence.num_generated - feedback.take_back)
                self._sink.rollback(sequence, feedback.take_back)
            self._insert(sequence, tokens)
            if feedback.stop and not sequence.is_finished:
                sequence.finish_reason = "stop"
        except BaseException as error:  # an error of a mask, say
            sequence.fail(error)
        if self._steps.strings and (self._found or feedback.take_back or tokens):
            sequence.stopping.text.follow(sequence)
            self._begin = len(sequence.stopping.text.certain)
        self._last, self._found = sequence.num_generated, None
        sequence.is_held = False
        engine.go_on(sequence)

    def _insert(self, sequence: Sequence, tokens: list[int]) -> None:
        for number, token in enumerate(tokens):
            if sequence.mask is not None and not sequence.mask.cut(sequence, [token]):
                raise sequence.mask.error or ValueError(
                    f"step_callback: the grammar does not allow the inserted text, from its token {number} on"
                )
            sequence.append(token)
            logprob = None if sequence.strategy.num_logprobs is None else TokenLogprob(token, math.nan)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            sequence.finish_reason = sequence.stopping.stop_now(sequence)
            self._sink.token(sequence, token, logprob)
            if sequence.is_finished:
                return

    # -- on the callback's thread --------------------------------------------------------------------------------------

    def _call_back(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        steps = self._steps
        try:
            feedback = steps.callback(self._context(sequence, tokens, logprobs))
            if feedback is None:
                feedback = StepFeedback()
            if not isinstance(feedback, StepFeedback):
                raise TypeError(f"step_callback must return a StepFeedback or None, got {feedback!r:.100}")
            max_removed = len(tokens) - self._num_healed(sequence, tokens)
            if feedback.take_back > max_removed:
                raise ValueError(
                    f"step_callback: take_back={feedback.take_back}, but only {max_removed} tokens can be removed"
                )
            inserted = _tokens_of(feedback.text, steps.tokenizer)
        except BaseException as error:
            steps.driver.tidy(partial(_fail, sequence=sequence, error=error))
            return
        steps.driver.tidy(lambda engine: self._resume(engine, sequence, feedback, inserted))

    def _context(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> StepContext:
        def text_of(count: int) -> str:
            return decode_after(self._steps.tokenizer, tokens[:count], sequence.text_rules)

        text, count, before = text_of(len(tokens)), 0, ""
        if self._found:
            begin = text.rfind(self._found)
            while count < len(tokens) and not text[:begin].startswith(text_of(len(tokens) - count)):
                count += 1
            before = text[len(text_of(len(tokens) - count)) : begin]
        captures = {} if self._captures is None else self._captures.read(tokens, logprobs)
        num_new, text = len(tokens) - self._last, text.rstrip(REPLACEMENT)
        return StepContext(self._row, list(tokens), num_new, text, self._found, count, before, captures)

    def _num_healed(self, sequence: Sequence, tokens: list[int]) -> int:
        """Returns the number of tokens that repeat the prompt's end, which must stay."""
        table, left, count = TokenBytes.of(self._steps.tokenizer), len(sequence.text_rules.prompt_end.encode()), 0
        while left > 0 and count < len(tokens):
            left -= len(table[tokens[count]])
            count += 1
        return count


def _tokens_of(text: str, tokenizer: Any) -> list[int]:
    """Returns the tokens of a text that continues another. If the tokenizer puts a blank before a text, tokenizes it
    after a character that is no part of a word."""
    tokens = tokenizer.encode(text, add_special_tokens=False) if text else []
    table = TokenBytes.of(tokenizer)
    if tokens and b"".join([table[token] for token in tokens]) == b" " + text.encode():
        for before in ("\n", "\1"):  # the second if the text's own line end would merge with the first
            anchor = tokenizer.encode(before, add_special_tokens=False)
            anchored = tokenizer.encode(before + text, add_special_tokens=False)
            if anchored[: len(anchor)] == anchor:
                return anchored[len(anchor) :]
    return tokens


def _fail(engine: Engine, sequence: Sequence, error: BaseException) -> None:
    if not sequence.is_finished:
        sequence.fail(error)
        engine.go_on(sequence)
