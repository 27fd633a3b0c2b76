"""Step callbacks: the caller looks at a text while it comes, and may stop it, or take back its end and put in another.

A sequence that reaches a step point, every so many tokens or at a string, is parked before the engine's next step. The
callback is asked on a thread of its own, so that others go on meanwhile, and what it says is done between two steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from pace.llm.decoding.captures import CaptureReader
from pace.llm.decoding.detokenizer import REPLACEMENT, Detokenizer, decode_after, find_stop
from pace.llm.decoding.token_bytes import TokenBytes
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.outputs import Capture
from pace.llm.sequence import Sequence, TokenLogprob, TokenSink


@dataclass(frozen=True)
class StepContext:
    """What a step callback is told: the text up to here."""

    row: int
    """Index into the output's rows."""
    token_ids: list[int]
    """All generated tokens."""
    num_new_tokens: int
    """Those since the last call, without what that call put in."""
    text: str
    """All of the generated text that is whole: what may still become a character is left out."""
    string: str | None
    """The one of `step_strings` that was found, with which this step ends; None where it is one of `step_every`."""
    num_string_tokens: int
    """The last tokens, in which that string is; 0 without one."""
    text_before_string: str
    """What else these tokens say, before the string. Taking them back takes this, too."""
    captures: dict[str, list[Capture]] = field(default_factory=dict)
    """What the grammar has captured so far."""


@dataclass(frozen=True)
class StepFeedback:
    """What a step callback wants. One that returns None goes on."""

    stop: bool = False
    """End here, with the finish reason "stop", after `text`."""
    take_back: int = 0
    """Generated tokens to forget, the last ones."""
    text: str = ""
    """To be put in then, as if the model had said it. Must be allowed where there is a grammar."""

    def __post_init__(self) -> None:
        for name, kind in (("stop", bool), ("take_back", int), ("text", str)):
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
                raise TypeError(f"StepFeedback: {name} must be of type {kind.__name__}, got {value!r:.100}")
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"StepFeedback: text holds half a character, a lone surrogate, at {error.start}") from None
        if self.take_back < 0:
            raise ValueError(f"StepFeedback: take_back must be 0 or more tokens, got {self.take_back}")


class RevisedSink(TokenSink, Protocol):
    """A sink that also hears of tokens that are taken back."""

    def taken_back(self, sequence: Sequence, num_tokens: int) -> None: ...


@dataclass(frozen=True)
class Steps:
    """The step points of one call: which they are, and who is asked there."""

    callback: Callable[[StepContext], StepFeedback | None]
    every: int | None
    strings: list[str]
    tokenizer: Any
    driver: EngineDriver


class RowSteps:
    """The step points of one sequence: a sink before the one of its client."""

    def __init__(self, steps: Steps, row: int, captures: CaptureReader | None) -> None:
        self._steps = steps
        self._row = row
        self._captures = captures
        self._sink: RevisedSink | None = None
        self._last = 0
        """Generated tokens at the last step point, with what was put in there."""
        self._found: str | None = None
        """The string at the step point that the sequence has reached."""
        self._text: _SearchedText | None = None

    def before(self, sink: RevisedSink, sequence: Sequence) -> RowSteps:
        """This sink, which tells `sink` of what stays."""
        self._sink = sink
        self._text = _SearchedText(self._steps, sequence)
        return self

    # -- on the engine's thread, within a step -------------------------------------------------------------------------

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        self._sink.token(sequence, token, logprob)
        if sequence.is_finished:
            return
        self._found = self._text.find_after(token)
        every = self._steps.every
        if self._found or (every is not None and sequence.num_generated - self._last >= every):
            sequence.is_held = True
            self._steps.driver.tidy(lambda engine: self._pause(engine, sequence))

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        self._sink.end(sequence, reason, error)

    # -- on the engine's thread, between two steps ---------------------------------------------------------------------

    def _pause(self, engine: Engine, sequence: Sequence) -> None:
        if sequence.is_finished:
            return
        try:
            engine.park(sequence, sequence.num_generated)
            told = (sequence, sequence.generated, list(sequence.logprobs))
            threading.Thread(target=self._ask, args=told, name="pace-step", daemon=True).start()
        except BaseException as error:  # of a mask, say
            _fail(engine, sequence, error)

    def _go_on(self, engine: Engine, sequence: Sequence, feedback: StepFeedback, tokens: list[int]) -> None:
        if sequence.is_finished:
            return
        try:
            if feedback.take_back:
                engine.park(sequence, sequence.num_generated - feedback.take_back)
                self._sink.taken_back(sequence, feedback.take_back)
            self._put_in(sequence, tokens)
            if feedback.stop and not sequence.is_finished:
                sequence.finish_reason = "stop"
        except BaseException as error:  # of a mask, say
            sequence.fail(error)
        if self._found or feedback.take_back or tokens:
            self._text = _SearchedText(self._steps, sequence)
        self._last, self._found = sequence.num_generated, None
        sequence.is_held = False
        engine.go_on(sequence)

    def _put_in(self, sequence: Sequence, tokens: list[int]) -> None:
        for number, token in enumerate(tokens):
            if sequence.mask is not None and not sequence.mask.cut(sequence, [token]):
                raise sequence.mask.error or ValueError(
                    f"step_callback: the grammar does not allow the text that is put in, from its token {number} on"
                )
            sequence.append(token)
            logprob = None if sequence.strategy.num_logprobs is None else TokenLogprob(token, math.nan)
            if logprob is not None:
                sequence.logprobs.append(logprob)
            sequence.finish_reason = sequence.stopping.stop_now(sequence)
            self._sink.token(sequence, token, logprob)
            if sequence.is_finished:
                return

    # -- on a thread of its own ----------------------------------------------------------------------------------------

    def _ask(self, sequence: Sequence, tokens: list[int], logprobs: list[TokenLogprob]) -> None:
        steps = self._steps
        try:
            feedback = steps.callback(self._context(sequence, tokens, logprobs))
            if feedback is None:
                feedback = StepFeedback()
            if not isinstance(feedback, StepFeedback):
                raise TypeError(f"step_callback must return a StepFeedback or None, got {feedback!r:.100}")
            most = len(tokens) - self._num_healed(sequence, tokens)
            if feedback.take_back > most:
                raise ValueError(f"step_callback takes back {feedback.take_back} tokens; there are {most}")
            put_in = _tokens_of(feedback.text, steps.tokenizer)
        except BaseException as error:
            steps.driver.tidy(partial(_fail, sequence=sequence, error=error))
            return
        steps.driver.tidy(lambda engine: self._go_on(engine, sequence, feedback, put_in))

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
        """The tokens that say the prompt's end again, which stay."""
        table, left, count = TokenBytes.of(self._steps.tokenizer), len(sequence.text_rules.prompt_end.encode()), 0
        while left > 0 and count < len(tokens):
            left -= len(table[tokens[count]])
            count += 1
        return count


class _SearchedText:
    """Finds step strings in what comes after the text that is there."""

    def __init__(self, steps: Steps, sequence: Sequence) -> None:
        self._strings = steps.strings
        self._longest = max(map(len, self._strings), default=0)
        self._detokenizer = Detokenizer(steps.tokenizer, sequence.text_rules)
        for token in sequence.generated if self._strings else ():
            self._detokenizer.push(token)
        self._searched = len(self._detokenizer.text)

    def find_after(self, token: int) -> str | None:
        """The string that the next token completes."""
        if not self._strings:
            return None
        self._detokenizer.push(token)
        text = self._detokenizer.text
        unseen = text[self._searched :] + self._detokenizer.pending
        index = find_stop(unseen, self._strings)
        self._searched = max(self._searched, len(text) - self._longest + 1)
        return None if index is None else next(string for string in self._strings if unseen.startswith(string, index))


def _tokens_of(text: str, tokenizer: Any) -> list[int]:
    """The tokens of a text that goes on after another: where the tokenizer puts a blank before a text, those after a
    character that is no part of a word."""
    tokens = tokenizer.encode(text, add_special_tokens=False) if text else []
    table = TokenBytes.of(tokenizer)
    if tokens and b"".join([table[token] for token in tokens]) == b" " + text.encode():
        for before in ("\n", "\1"):  # the second where the text's own line end would be joined to the first
            anchor = tokenizer.encode(before, add_special_tokens=False)
            anchored = tokenizer.encode(before + text, add_special_tokens=False)
            if anchored[: len(anchor)] == anchor:
                return anchored[len(anchor) :]
    return tokens


def _fail(engine: Engine, sequence: Sequence, error: BaseException) -> None:
    if not sequence.is_finished:
        sequence.fail(error)
        engine.go_on(sequence)
