"""Stopping criteria of a sequence."""

from __future__ import annotations

from collections.abc import Iterable

from pace.llm.sequence import Sequence, Stopping
from pace.llm.text.reader import TextReader


class StoppingCriteria(Stopping):
    """Ends one sequence at an end token, a stop string, a finished mask, or the maximum length."""

    def __init__(self, max_length: int, end_tokens: Iterable[int] = (), text: TextReader | None = None) -> None:
        """`max_length` counts prompt and generated tokens. `end_tokens` are kept in the output, as in transformers.
        `text` has the stop strings. The tokens of a match stay in the output; the text is cut before it. Text after a
        match within the same token is cut too."""
        self.max_length = max_length
        self.end_tokens = frozenset(end_tokens)
        self.text = text or TextReader(None)
        """Text of the generated tokens; read only if there are stop strings or step strings."""

    def stop_now(self, sequence: Sequence) -> str | None:
        """Returns "stop" if the last token ends the sequence, completes a stop string or finishes its mask, "length" at
        the maximum length, else None. Must be called after every generated token; calling again changes nothing."""
        if self.text.strings:
            self.text.follow(sequence)
        if (
            self.text.cut is not None or sequence.tokens[-1] in self.end_tokens
        ):  # a string within an end token cuts, too
            return "stop"
        if sequence.mask is not None and sequence.mask.is_finished_after(sequence):
            return "stop"
        return "length" if len(sequence.tokens) >= self.max_length else None

    def fork(self) -> StoppingCriteria:
        """Returns the criteria for a second sequence with the same tokens."""
        return StoppingCriteria(self.max_length, self.end_tokens, self.text.fork())

    def rewind(self, num_generated: int) -> None:
        """Drops all generated tokens but the first `num_generated`. Must be called when tokens are removed from the end
        of a sequence, so that their stop strings do not cut its text."""
        self.text.rewind(num_generated)


class NeverStops(Stopping):
    """Criteria of sequences that generate nothing: sessions and scores."""

    def stop_now(self, sequence: Sequence) -> str | None:
        return None
