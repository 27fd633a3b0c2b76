"""Thinking budgets: once a thought has a number of tokens, its closing mark must follow, token by token.

The marks are found in the bytes of the generated tokens, as the parser finds them in their text. So a mark counts in
any division into tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from torch import Tensor

from pace.llm.chat.reasoning import Reasoning
from pace.llm.chat.template import ChatTemplate
from pace.llm.constraints.grammars import encoder_within
from pace.llm.constraints.masks import TokenMask, fill_bits
from pace.llm.text.token_bytes import TokenBytes

NUM_LAST_TOKENS = 32
"""Tokens at the end of a prompt that are searched for a mark: more than any mark and the whitespace after it have."""


class Place(Enum):
    """Position of an answer relative to its thought."""

    BEFORE = "before"
    WITHIN = "within"
    AFTER = "after"


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a thought after some tokens of the answer."""

    place: Place
    num_thought: int = 0
    """Tokens after the opening mark so far, also those of earlier thoughts."""
    held: bytes = b""
    """End of the text that may begin the next mark."""
    last: bytes = b""
    """Last bytes of the thought, at most 3: they may be part of a character."""
    due: tuple[int, ...] = ()
    """Tokens that must follow: the rest of the closing mark, once the budget is spent."""

    @property
    def is_within_character(self) -> bool:
        """True if the text ends within a UTF-8 character."""
        for back, byte in enumerate(reversed(self.last), 1):
            if byte & 0xC0 != 0x80:  # not a continuation
                return back < 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
        return False


class Thoughts:
    """The marks of one model's thoughts, in bytes and in tokens."""

    def __init__(self, reasoning: Reasoning, tokenizer: Any) -> None:
        """Raises ValueError if the tokenizer cannot write the marks."""
        self._reasoning = reasoning
        self._table = TokenBytes.of(tokenizer)
        self._opening = _Mark(reasoning.opening, tokenizer)
        self._closing = _Mark(reasoning.closing, tokenizer)

    @property
    def closing(self) -> str:
        return self._reasoning.closing

    def begin(self, prompt: list[int], budget: int) -> Progress:
        """Returns the progress after a prompt, in which a thought may have begun or ended."""
        text = b"".join(map(self._table.__getitem__, prompt[-NUM_LAST_TOKENS:])).decode("utf-8", "replace")
        found = self._reasoning.after(text)
        if found is None:
            return Progress(Place.AFTER)
        return self._settled(Progress(Place.WITHIN if found.begun else Place.BEFORE), b"", budget)

    def after(self, now: Progress, token: int, budget: int) -> Progress:
        """Returns the progress after one more token."""
        if now.place is Place.AFTER:
            return now
        if now.due and token == now.due[0]:
            rest = replace(now, num_thought=now.num_thought + 1, due=now.due[1:])
            return rest if rest.due else self._over(rest)
        return self._settled(replace(now, due=()), self._bytes(token), budget, now.place is Place.WITHIN)

    def banned(self, now: Progress, budget: int) -> int | None:
        """Returns a token that would begin one more thought after a spent budget; None if no token would."""
        if not self._reasoning.repeats or now.place is not Place.BEFORE or now.num_thought < budget:
            return None
        tokens = self._opening.tokens
        if len(tokens) == 1:
            return tokens[0]
        return tokens[1] if now.held == self._table[tokens[0]] else None

    def _bytes(self, token: int) -> bytes:
        """Returns the bytes of a token; b"" for a special token that is part of no mark, which is not text."""
        data = self._table[token]
        if token in self._table.special and data not in self._opening.data and data not in self._closing.data:
            return b""
        return data

    def _settled(self, now: Progress, data: bytes, budget: int, is_thought: bool = False) -> Progress:
        """Returns the progress after the bytes of a token. `is_thought`: the token counts as one of the thought."""
        now = replace(now, num_thought=now.num_thought + is_thought)
        if now.place is Place.BEFORE:
            text = now.held + data
            if not self._reasoning.repeats:  # the mark begins the answer
                text = text.lstrip()
                if not text.startswith(self._opening.data):
                    waits = self._opening.data.startswith(text)
                    return replace(now, held=text) if waits else Progress(Place.AFTER)
            _, found, rest = text.partition(self._opening.data)
            if not found:
                return replace(now, held=self._opening.begun_at_the_end_of(text))
            now, data = replace(now, place=Place.WITHIN, held=b"", last=b""), rest
        text = now.held + data
        if self._closing.data in text:
            return self._over(now)
        held = self._closing.begun_at_the_end_of(text)
        due = self._closing.tokens_after(held) if now.num_thought >= budget else ()
        return replace(now, held=held, last=(now.last + data)[-3:], due=due)

    def _over(self, now: Progress) -> Progress:
        """Returns the progress after a closing mark."""
        return Progress(Place.BEFORE if self._reasoning.repeats else Place.AFTER, now.num_thought)


class _Mark:
    """A mark, and the tokens with which it is written."""

    def __init__(self, text: str, tokenizer: Any) -> None:
        self.data = text.encode()
        self.tokens = tuple(_encode(text, tokenizer))
        ends = range(1, len(self.tokens))
        self._rests = {_bytes_of(self.tokens[:end], tokenizer): self.tokens[end:] for end in ends}
        """Tokens after each beginning of the mark that is whole tokens."""

    def begun_at_the_end_of(self, text: bytes) -> bytes:
        """Returns the longest end of a text with which the mark may begin."""
        longest = min(len(text), len(self.data) - 1)
        return next((text[-n:] for n in range(longest, 0, -1) if self.data.startswith(text[-n:])), b"")

    def tokens_after(self, held: bytes) -> tuple[int, ...]:
        """Returns the tokens that complete the mark after `held`, its beginning or other text."""
        return self._rests.get(held, self.tokens)


class ThinkingMask(TokenMask):
    """Allows `budget` tokens of thought. Then it forces the closing mark, and allows everything after it. A second
    mask, of the same tokens, may hold as well.

    A grammar has no place for the closing mark within a character. Such a thought first completes the character, in at
    most three more tokens.
    """

    def __init__(self, thoughts: Thoughts, budget: int, prompt: list[int], other: TokenMask | None = None) -> None:
        self._thoughts = thoughts
        self._budget = budget
        self._other = other
        self._progress = [thoughts.begin(prompt, budget)]
        """The progress at the start and after each token."""

    @property
    def releases_gil(self) -> bool:
        return self._other is not None and self._other.releases_gil

    @property
    def is_finished(self) -> bool:
        return self._other is not None and self._other.is_finished

    @property
    def is_open(self) -> bool:
        return self._progress[-1].place is Place.AFTER and (self._other is None or self._other.is_open)

    def fill(self, row: Tensor) -> None:
        due = self._due()
        if due:
            fill_bits(row, due[:1])
            return
        if self._other is None:
            row.fill_(-1)
        else:
            self._other.fill(row)
        if (banned := self._thoughts.banned(self._progress[-1], self._budget)) is not None:
            row.numpy().view(np.uint32)[banned >> 5] &= ~np.uint32(1 << (banned & 31))

    def accept(self, token: int) -> None:
        now, due = self._progress[-1], self._due()
        if due[:1] not in ((), (token,)) or token == self._thoughts.banned(now, self._budget):
            raise ValueError(f"thinking_budget={self._budget} does not allow the token {token} here")
        if self._other is not None:
            self._other.accept(token)
        self._progress.append(self._thoughts.after(now, token, self._budget))

    def rollback(self, num_tokens: int) -> None:
        if self._other is not None:
            self._other.rollback(num_tokens)
        del self._progress[len(self._progress) - num_tokens :]

    def count_allowed(self, tokens: list[int]) -> int:
        now, most = self._progress[-1], len(tokens) if self._other is None else self._other.count_allowed(tokens)
        for count, token in enumerate(tokens[:most]):
            if now.due[:1] not in ((), (token,)) or token == self._thoughts.banned(now, self._budget):
                return count
            now = self._thoughts.after(now, token, self._budget)
        return most

    def forced(self) -> list[int]:
        tokens = list(self._due()) or ([] if self._other is None else self._other.forced())
        return tokens[: self.count_allowed(tokens)]

    def fork(self) -> ThinkingMask:
        fork: ThinkingMask = super().fork()
        fork._other = None if self._other is None else self._other.fork()
        return fork

    def _due(self) -> tuple[int, ...]:
        """Returns the tokens that must follow. Raises ValueError if the other mask does not allow them, unless the
        text ends within a character."""
        now = self._progress[-1]
        if not now.due or self._other is None or self._other.count_allowed(list(now.due[:1])):
            return now.due
        if now.is_within_character:
            return ()
        raise ValueError(
            f"thinking_budget={self._budget} is spent, and the grammar or token_mask does not allow the end of the "
            f"thought, {self._thoughts.closing!r}; let it allow that, or leave out one of them"
        )


def _encode(mark: str, tokenizer: Any) -> list[int]:
    """Returns the tokens of a mark within a text. Raises ValueError if the tokenizer cannot write it."""
    tokens = tokenizer.encode(mark, add_special_tokens=False)
    if _bytes_of(tokens, tokenizer) != mark.encode():
        tokens = encoder_within(tokenizer)(mark)
    if _bytes_of(tokens, tokenizer).strip() != mark.encode():
        raise ValueError(f"thinking_budget: the tokenizer cannot write {mark!r}, a mark of the thought; leave it out")
    return tokens


def _bytes_of(tokens: Iterable[int], tokenizer: Any) -> bytes:
    return b"".join(map(TokenBytes.of(tokenizer).__getitem__, tokens))


def find_reasoning(tokenizer: Any) -> Reasoning | None:
    """Returns the marks of a model's thoughts, by its chat template; None if it has none that are known."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    return ChatTemplate(tokenizer).reasoning
