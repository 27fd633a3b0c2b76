"""Token masks, for grammars and lists of choices: one bit for each token of the vocabulary."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from pace.llm.sequence import Mask, Sequence, fork_by_copy


class TokenMask:
    """Defines which tokens may follow those accepted so far.

    One object serves one sequence: each gets a `fork()` of `SamplingConfig(token_mask=...)`. It receives only generated
    tokens, not those of the prompt or an end token that ends the sequence. A drafted end token is accepted and rolled
    back like any other. Subclasses define `fill`, `accept`, `rollback` and `count_allowed`. They also define `fork` if
    their state is more than containers of plain values.

    `fill` may run on a thread in parallel with the model. No two methods of one object run at the same time. The same
    holds for an object and its forks made in the same call. Methods of different sequences may run at the same time if
    `releases_gil` is set.
    """

    releases_gil = False
    """True if `fill` releases the GIL, so that several threads are useful."""

    @property
    def is_finished(self) -> bool:
        """True if no token may follow: the sequence then ends with "stop", and `fill` is not called again."""
        return False

    @property
    def is_open(self) -> bool:
        """True if every token may follow from here on: the sequence then continues without a mask."""
        return False

    def fill(self, row: Tensor) -> None:
        """Writes all of `row` int32 `[ceil(V / 32)]`. Bit `i % 32` of word `i // 32` (1 is the lowest) is set if token
        i may come next, as in llguidance and xgrammar. Bits beyond the vocabulary are ignored; `fill_bits` may help. At
        least one token must be allowed."""
        raise NotImplementedError(f"{type(self).__name__} must define fill(row)")

    def accept(self, token: int) -> None:
        """Accepts one token. Raises ValueError for a token that is not allowed; the state is then unchanged."""
        raise NotImplementedError(f"{type(self).__name__} must define accept(token)")

    def rollback(self, num_tokens: int) -> None:
        """Goes back to the state before the last `num_tokens` calls of `accept`."""
        raise NotImplementedError(f"{type(self).__name__} must define rollback(num_tokens)")

    def count_allowed(self, tokens: list[int]) -> int:
        """Returns how many of `tokens` may come in sequence, from the first on. Changes nothing, and should be cheap:
        drafts that are not allowed are dropped before the model runs."""
        raise NotImplementedError(f"{type(self).__name__} must define count_allowed(tokens)")

    def forced(self) -> list[int]:
        """Returns tokens that must come next in sequence, because nothing else is allowed. The list may be incomplete
        or empty. The tokens are computed together in one step, without asking the strategy."""
        return []

    def fork(self) -> TokenMask:
        """Returns a second mask in the same state; later changes of one must not show in the other. By default a
        shallow copy that also copies lists, dicts, sets and other containers among the attributes, but not their
        items."""
        return fork_by_copy(self)


def fill_bits(row: Tensor, tokens: Iterable[int] | np.ndarray) -> None:
    """Sets the bits of `tokens` in `row` int32 `[ceil(V / 32)]` and clears all others. Raises ValueError for tokens
    beyond the row."""
    tokens = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=np.int64)
    words = row.numpy().view(np.uint32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 32 * len(words):
        raise ValueError(
            f"a mask of {32 * len(words)} bits has no place for the token "
            f"{tokens.max() if tokens.min() >= 0 else tokens.min()}"
        )
    words.fill(0)
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


class AllowedTokens(TokenMask):
    """Allows the same tokens at every position."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """Raises ValueError for an empty `tokens`."""
        self._allowed = frozenset(tokens)
        if not self._allowed:
            raise ValueError("AllowedTokens got no token; name at least one")
        self._words = torch.empty(0, dtype=torch.int32)  # replaced, never changed: forks share it

    def fill(self, row: Tensor) -> None:
        if len(self._words) != len(row):
            words = torch.empty_like(row)
            fill_bits(words, self._allowed)
            self._words = words
        row.copy_(self._words)

    def accept(self, token: int) -> None:
        if token not in self._allowed:
            raise ValueError(f"the token {token} is not among the {len(self._allowed)} that are allowed")

    def rollback(self, num_tokens: int) -> None:
        pass

    def count_allowed(self, tokens: list[int]) -> int:
        return next((index for index, token in enumerate(tokens) if token not in self._allowed), len(tokens))


class SequenceMask(Mask):
    """The mask of one sequence, and how many generated tokens it has accepted."""

    def __init__(self, template: TokenMask) -> None:
        """Serves the sequence with a fork of `template`. The fork is made on first use: on the engine's thread, where
        no other fork of the same template is in use."""
        self.error: BaseException | None = None
        """Error of the mask that could not be raised at once. The mask's state is then undefined."""
        self._template: TokenMask | None = template
        self._mask: TokenMask | None = None
        self._num_accepted = 0

    @property
    def mask(self) -> TokenMask:
        if self._mask is None:
            self._mask, self._template = self._template.fork(), None
        return self._mask

    @property
    def releases_gil(self) -> bool:
        """`TokenMask.releases_gil`; False for a mask that could not be forked, with the reason in `error`."""
        return self._mask is not None and self._mask.releases_gil

    def fork(self) -> SequenceMask:
        """Returns a copy for a second sequence with the same tokens."""
        fork = SequenceMask(self.mask)
        fork.error, fork._num_accepted = self.error, self._num_accepted
        fork._mask, fork._template = self.mask.fork(), None
        return fork

    def follow(self, sequence: Sequence) -> None:
        """Accepts the sequence's new generated tokens and rolls back those it no longer has. Removes the mask from the
        sequence if every token may follow from here on."""
        if self.error is not None:
            raise self.error
        num_generated = sequence.num_generated
        if self._num_accepted > num_generated:
            self.mask.rollback(self._num_accepted - num_generated)
            self._num_accepted = num_generated
        while self._num_accepted < num_generated:
            self.mask.accept(sequence.tokens[sequence.num_prompt_tokens + self._num_accepted])
            self._num_accepted += 1
        if self.mask.is_open and sequence.steps is None:  # otherwise tokens may be rolled back
            sequence.mask = None

    def is_finished_after(self, sequence: Sequence) -> bool:
        """True if no token may follow the sequence's tokens."""
        self.follow(sequence)
        return self.mask.is_finished

    def forced_after(self, sequence: Sequence, vocab_size: int) -> list[int]:
        """Returns the tokens that must follow the sequence's. Errors of the mask go to `error`, as does a ValueError
        for an invalid token."""
        try:
            self.follow(sequence)
            tokens = [operator.index(token) for token in self.mask.forced()]
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"the token_mask forces the token {token}; ids are 0 to {vocab_size - 1}")
            return tokens
        except BaseException as error:
            self.error = error
            return []

    def cut(self, sequence: Sequence, drafts: list[int]) -> list[int]:
        """Returns the first of `drafts`, up to one that may not follow. Errors of the mask go to `error`."""
        try:
            self.follow(sequence)
            return drafts[: self.mask.count_allowed(drafts)] if drafts else drafts
        except BaseException as error:  # a panic in a Rust library is not an Exception
            self.error = error
            return []

    def fill(self, rows: Tensor, drafts: list[int]) -> tuple[int, BaseException | None]:
        """Fills the last row of `rows` int32 `[M, W]` with the tokens that may follow all of `drafts`. Each row before
        it is for one draft less. Returns the number of filled rows, and the error of the next one, if any. The mask's
        state is unchanged."""
        num_filled = num_accepted = 0
        failure = self.error
        try:
            while failure is None and num_filled < len(rows):
                if len(drafts) - num_accepted < len(rows):
                    if self.mask.is_finished:
                        raise ValueError("the token_mask is finished: nothing may follow")
                    self.mask.fill(rows[num_filled])
                    num_filled += 1
                if num_accepted < len(drafts):
                    self.mask.accept(drafts[num_accepted])
                    num_accepted += 1
        except BaseException as error:
            failure = error
        try:
            if num_accepted:
                self.mask.rollback(num_accepted)
        except BaseException as error:
            self.error = error
        return num_filled, failure
