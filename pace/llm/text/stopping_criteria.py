"""Stopping criteria of a sequence."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

from pace.llm.sequence import PLAIN_TEXT, Sequence, Stopping, TextRules
from pace.llm.text.detokenizer import Detokenizer, StopSearch


class StoppingCriteria(Stopping):
    """Ends one sequence at an end token, a stop string, a finished mask, or the maximum length."""

    def __init__(self, max_length: int, end_tokens: Iterable[int] = (), stop_strings: TextStop | None = None) -> None:
        """`max_length` counts prompt and generated tokens. `end_tokens` are kept in the output, as in transformers."""
        self.max_length = max_length
        self.end_tokens = frozenset(end_tokens)
        self.stop_strings: TextStop = stop_strings or NoStopStrings()

    def stop_now(self, sequence: Sequence) -> str | None:
        """Returns "stop" if the last token ends the sequence, completes a stop string or finishes its mask, "length" at
        the maximum length, else None. Must be called after every generated token; calling again changes nothing."""
        has_stop_string = self.stop_strings.found(sequence)  # in the text of an end token, too
        if has_stop_string or sequence.tokens[-1] in self.end_tokens:
            return "stop"
        if sequence.mask is not None and sequence.mask.is_finished_after(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= self.max_length else None

    def fork(self) -> StoppingCriteria:
        """Returns the criteria for a second sequence with the same tokens."""
        return StoppingCriteria(self.max_length, self.end_tokens, self.stop_strings.fork())

    def rewind(self, num_generated: int) -> None:
        """Drops all generated tokens but the first `num_generated`. To be called when tokens are dropped from the end
        of a sequence, so that they do not cut its text."""
        self.stop_strings.rewind(num_generated)

    def trim(self, text: str) -> str:
        """Returns the generated text up to the stop string that ended it."""
        return self.stop_strings.trim(text)

    @property
    def matched_string(self) -> str | None:
        """The stop string that was found."""
        return self.stop_strings.matched


class NeverStops(Stopping):
    """Criteria of sequences that generate nothing: sessions and scores."""

    matched_string = None

    def stop_now(self, sequence: Sequence) -> str | None:
        return None


class TextStop(Protocol):
    matched: str | None
    """The string that was found."""

    def found(self, sequence: Sequence) -> bool: ...

    def fork(self) -> TextStop: ...

    def rewind(self, num_generated: int) -> None: ...

    def trim(self, text: str) -> str: ...


class NoStopStrings:
    """Stop strings of a sequence that has none."""

    matched = None

    def found(self, sequence: Sequence) -> bool:
        return False

    def fork(self) -> NoStopStrings:
        return self

    def rewind(self, num_generated: int) -> None:
        pass

    def trim(self, text: str) -> str:
        return text


class StopStrings:
    """Finds the first of some strings in the generated text, across tokens or within one.

    The tokens of a match stay in the output; the text is cut before it. Text after a match within the same token is cut
    too.
    """

    def __init__(self, tokenizer: Any, strings: list[str], rules: TextRules = PLAIN_TEXT) -> None:
        self.strings = strings
        self.cut: int | None = None
        self.matched: str | None = None
        self._search = StopSearch(tokenizer, strings, rules)
        self._start(Detokenizer(tokenizer, rules))

    def _start(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self._searched = 0  # start of the next search
        self._num_searched = 0  # number of tokens
        self._marks: tuple[tuple[int, int, str], ...] = ()  # number, text position and letter of hidden tokens

    def found(self, sequence: Sequence) -> bool:
        # Can be interrupted anywhere and resumed: each token is pushed once and searched at least once.
        while self.cut is None and self._num_searched < sequence.num_generated:
            token = sequence.tokens[sequence.num_prompt_tokens + self._num_searched]
            if self.detokenizer.num_pushed == self._num_searched:
                self.detokenizer.push(token)
            text, pending = self.detokenizer.text, self.detokenizer.pending
            if letter := self._search.letter_of(token):
                before = [mark for mark in self._marks if mark[0] < self._num_searched]
                self._marks = (*before, (self._num_searched, len(text + pending), letter))[-self._search.longest :]
            marks = [(place - self._searched, letter) for _, place, letter in self._marks if place >= self._searched]
            found = self._search.find(text[self._searched :] + pending, marks)
            if found is not None:
                self.matched = found[1]
                self.cut = self._searched + found[0]
                break
            self._searched = max(0, len(text) - self._search.longest + 1)
            self._num_searched += 1
        return self.cut is not None

    def fork(self) -> StopStrings:
        twin = copy.copy(self)
        twin.detokenizer = self.detokenizer.fork()
        return twin

    def rewind(self, num_generated: int) -> None:
        """Restarts the search; the remaining tokens are pushed again on the next call of `found`."""
        if num_generated < self.detokenizer.num_pushed:
            self.cut = self.matched = None
            self._start(Detokenizer(self.detokenizer.tokenizer, self.detokenizer.rules))

    def trim(self, text: str) -> str:
        return text[: self.cut]
