"""Drafts from the sequence itself: the tokens that followed an earlier occurrence of its last tokens."""

from __future__ import annotations

from torch import Tensor

from pace.batch import LayerBlocks
from pace.llm.engine.drafter import DraftMemory
from pace.llm.sequence import Sequence, Span


class NgramIndex:
    """Index of the last end position of each run of `min_ngram .. max_ngram` tokens in a growing list."""

    def __init__(self, tokens: list[int], min_ngram: int, max_ngram: int) -> None:
        """`tokens` is read in place, and may only grow."""
        self.tokens = tokens
        self.match = 0
        """Position after the run that `find` found."""
        self._lengths = range(min_ngram, max_ngram + 1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0  # runs that end before this position are in `_ends`

    def find(self) -> int | None:
        """Returns the length of the longest run of last tokens that occurs before, `max_ngram` at most; None if there
        is none of `min_ngram` or more.

        Of several occurrences the last one counts. The run at the end itself is not found, as it is indexed only after
        the search."""
        self._catch_up()
        tokens, length = self.tokens, len(self.tokens)
        ends = self._ends
        for size in reversed(self._lengths):
            if size < length:
                end = ends.get(tuple(tokens[length - size :]))
                if end is not None:
                    self.match = end
                    return size
        return None

    def following(self, num_tokens: int) -> list[int]:
        """Returns the tokens after the run that was found. If the sequence ends before, they are repeated."""
        tokens, start = self.tokens, self.match
        found = tokens[start : start + num_tokens]
        while len(found) < num_tokens:
            found.append(found[len(found) - (len(tokens) - start)])
        return found

    def _catch_up(self) -> None:
        """Indexes all runs that end before the last token."""
        tokens, ends = self.tokens, self._ends
        for end in range(self._num_indexed + 1, len(tokens)):
            for size in self._lengths:
                if size > end:
                    break
                ends[tuple(tokens[end - size : end])] = end
        self._num_indexed = max(self._num_indexed, len(tokens) - 1)


class PromptLookup:
    """`DraftSource` that searches the last tokens in prompt and output. The kind of a proposal is the number of
    matching tokens."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._min_ngram, self._max_ngram = min_ngram, max_ngram
        self._indices: dict[Sequence, NgramIndex] = {}

    def kind(self, sequence: Sequence, most: int) -> int | None:
        index = self._indices.get(sequence)
        if index is None:
            index = self._indices[sequence] = NgramIndex(sequence.tokens, self._min_ngram, self._max_ngram)
        return index.find()

    def seconds(self, sequences: list[Sequence], lengths: list[int]) -> float:
        return 0.0

    def propose(
        self, sequences: list[Sequence], lengths: list[int], kv: list[LayerBlocks] | None = None
    ) -> list[list[int]]:
        return [self._indices[sequence].following(length) for sequence, length in zip(sequences, lengths)]

    def spent(self) -> float:
        return 0.0

    def observe(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor) -> None:
        pass

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)

    def reset(self) -> None:
        self._indices.clear()

    def check_integrity(self) -> None:
        assert not [sequence for sequence in self._indices if sequence.is_finished], (
            "an index is kept for a sequence that is done"
        )

    def bytes_for(self, num_tokens: int) -> int:
        return 0

    def memory(self) -> DraftMemory:
        return DraftMemory()
