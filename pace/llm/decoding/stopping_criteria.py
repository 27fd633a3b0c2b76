"""When a sequence is done, and why."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Protocol

from pace.llm.decoding.detokenizer import Detokenizer, find_stop
from pace.llm.sequence import Sequence


class StoppingCriteria:
    """End tokens, stop strings and length, of one sequence."""

    def __init__(self, max_length: int, end_tokens: Iterable[int] = (), stop_strings: TextStop | None = None) -> None:
        """`max_length` counts prompt and generated tokens. `end_tokens` are kept in the output, as in transformers."""
        self.max_length = max_length
        self.end_tokens = frozenset(end_tokens)
        self.stop_strings: TextStop = stop_strings or NoStopStrings()

    def stop_now(self, sequence: Sequence) -> str | None:
        """ "stop" where the last token ends the sequence or completes a stop string, "length" where it was the last
        allowed, else None. To be asked after every generated token; asking again changes nothing."""
        if sequence.tokens[-1] in self.end_tokens or self.stop_strings.found(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= self.max_length else None

    def fork(self) -> StoppingCriteria:
        """The criteria of a second sequence with the same tokens."""
        return StoppingCriteria(self.max_length, self.end_tokens, self.stop_strings.fork())

    def trim(self, text: str) -> str:
        """The generated text up to the stop string that ended it."""
        return self.stop_strings.trim(text)


class NeverStops:
    """For sequences that generate nothing: sessions and scores."""

    def stop_now(self, sequence: Sequence) -> str | None:
        return None


class TextStop(Protocol):
    def found(self, sequence: Sequence) -> bool: ...

    def fork(self) -> TextStop: ...

    def trim(self, text: str) -> str: ...


class NoStopStrings:
    """Looks at no text."""

    def found(self, sequence: Sequence) -> bool:
        return False

    def fork(self) -> NoStopStrings:
        return self

    def trim(self, text: str) -> str:
        return text


class StopStrings:
    """Finds the first of some strings in the generated text, also across tokens or within one.

    The tokens of a match stay in the output; the text is cut before it. What follows a match within the same token is
    cut too.
    """

    def __init__(self, tokenizer: Any, strings: list[str]) -> None:
        self.strings = strings
        self.detokenizer = Detokenizer(tokenizer)
        self.cut: int | None = None
        self._num_seen = 0
        self._longest = max(map(len, strings))

    def found(self, sequence: Sequence) -> bool:
        while self._num_seen < sequence.num_generated and self.cut is None:
            searched = max(0, len(self.detokenizer.text) - self._longest + 1)
            self.detokenizer.push(sequence.tokens[sequence.num_prompt_tokens + self._num_seen])
            self._num_seen += 1
            text = self.detokenizer.text[searched:] + self.detokenizer.pending
            index = find_stop(text, self.strings)
            if index is not None:
                self.cut = searched + index
        return self.cut is not None

    def fork(self) -> StopStrings:
        twin = copy.copy(self)
        twin.detokenizer = self.detokenizer.fork()
        return twin

    def trim(self, text: str) -> str:
        return text[: self.cut]
