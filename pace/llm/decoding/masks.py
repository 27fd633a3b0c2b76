"""Which tokens may come next: a grammar, a list of choices. One bit for each token of the vocabulary."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.decoding.forking import fork_by_copy


class TokenMask:
    """Which tokens may follow those accepted so far.

    One object serves one sequence: each gets a `fork()` of what `SamplingConfig(token_mask=...)` names. It hears of
    generated tokens only, not of the prompt's, and of no end token that ends the sequence; where such a token is drafted,
    it is accepted and rolled back like any other. Subclasses define `fill`,
    `accept`, `rollback` and `count_allowed`, and `fork` where their state is more than containers of plain values.

    `fill` may run on a thread beside the model. No two methods of one object, nor of an object and its forks made in the
    same call, run at the same time; those of different sequences may where `releases_gil` is set.
    """

    releases_gil = False
    """True where `fill` leaves the interpreter to others, so that several threads are worth having."""

    @property
    def is_finished(self) -> bool:
        """True where no token may follow: the sequence then ends with "stop". `fill` is not asked any more."""
        return False

    @property
    def is_open(self) -> bool:
        """True where every token may follow from here on, whatever comes: the sequence then goes on without a mask."""
        return False

    def fill(self, row: Tensor) -> None:
        """Writes all of `row` int32 `[ceil(V / 32)]`: bit `i % 32` of word `i // 32` (1 is the lowest) is set where token
        i may come next, as llguidance and xgrammar have it. Bits beyond the vocabulary mean nothing; `fill_bits` may
        help. At least one token must be allowed."""
        raise NotImplementedError(f"{type(self).__name__} must define fill(row)")

    def accept(self, token: int) -> None:
        """Follows one token. Raises ValueError for one that is not allowed; the state is then as before."""
        raise NotImplementedError(f"{type(self).__name__} must define accept(token)")

    def rollback(self, num_tokens: int) -> None:
        """Goes back to the state before the last `num_tokens` calls of `accept`."""
        raise NotImplementedError(f"{type(self).__name__} must define rollback(num_tokens)")

    def count_allowed(self, tokens: list[int]) -> int:
        """How many of `tokens` may come one after the other, from the first on. Changes nothing, and should be cheap:
        proposed tokens that are not allowed are dropped before the model runs."""
        raise NotImplementedError(f"{type(self).__name__} must define count_allowed(tokens)")

    def forced(self) -> list[int]:
        """Tokens that must come next, one after the other, as nothing else is allowed; may be fewer than there are, or
        none. They are computed together in one step, and no strategy is asked about them."""
        return []

    def fork(self) -> TokenMask:
        """A second mask in the same state; what either does later must not show in the other. By default a shallow copy,
        in which lists, dicts, sets and other containers that are attributes are copied too, but not what they hold."""
        return fork_by_copy(self)


def fill_bits(row: Tensor, tokens: Iterable[int] | np.ndarray) -> None:
    """Sets the bits of `tokens` in `row` int32 `[ceil(V / 32)]` and clears all others. Raises ValueError for tokens
    beyond the row."""
    tokens = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), dtype=np.int64)
    words = row.numpy().view(np.uint32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < 32 * len(words):
        raise ValueError(
            f"a mask of {32 * len(words)} bits has no place for the token {tokens.max() if tokens.min() >= 0 else tokens.min()}"
        )
    words.fill(0)
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


class AllowedTokens(TokenMask):
    """The same tokens at every place, and no others."""

    def __init__(self, tokens: Iterable[int]) -> None:
        """Raises ValueError for no token, which would leave nothing to pick."""
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


class SequenceMask:
    """The mask of one sequence, and how many of its generated tokens it has accepted."""

    def __init__(self, template: TokenMask) -> None:
        """A fork of `template` serves the sequence. It is made where it is first wanted: on the engine's thread, where no
        other fork of the same template is at work."""
        self.error: BaseException | None = None
        """What the mask raised where nobody could be told: its state is not known any more."""
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
        """`TokenMask.releases_gil`; False for one that could not be forked, of which `error` says why."""
        return self._mask is not None and self._mask.releases_gil

    def fork(self) -> SequenceMask:
        """That of a second sequence with the same tokens."""
        twin = SequenceMask(self.mask)
        twin.error, twin._num_accepted = self.error, self._num_accepted
        twin._mask, twin._template = self.mask.fork(), None
        return twin

    def follow(self, sequence: Any) -> None:
        """Accepts what is new of the sequence's generated tokens; takes back those that it has not any more. Leaves the
        sequence where every token may follow from here on."""
        if self.error is not None:
            raise self.error
        num_generated = sequence.num_generated
        if self._num_accepted > num_generated:
            self.mask.rollback(self._num_accepted - num_generated)
            self._num_accepted = num_generated
        while self._num_accepted < num_generated:
            self.mask.accept(sequence.tokens[sequence.num_prompt_tokens + self._num_accepted])
            self._num_accepted += 1
        if self.mask.is_open and sequence.steps is None:  # else some may be taken back
            sequence.mask = None

    def is_finished_after(self, sequence: Any) -> bool:
        """Whether nothing may follow the sequence's tokens."""
        self.follow(sequence)
        return self.mask.is_finished

    def forced_after(self, sequence: Any, vocab_size: int) -> list[int]:
        """The tokens that must follow the sequence's. What the mask raises is kept in `error`, and a ValueError for what
        is no token."""
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

    def cut(self, sequence: Any, drafts: list[int]) -> list[int]:
        """The first of `drafts`, up to one that may not follow. What the mask raises is kept in `error`."""
        try:
            self.follow(sequence)
            return drafts[: self.mask.count_allowed(drafts)] if drafts else drafts
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.error = error
            return []

    def fill(self, rows: Tensor, drafts: list[int]) -> tuple[int, BaseException | None]:
        """Fills the last of `rows` int32 `[M, W]` with what may follow all of `drafts`, each row before it after one
        draft less. Returns how many rows hold something, and what was raised at the next one, if anything. The mask is
        then as it was."""
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
