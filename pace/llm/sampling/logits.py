"""Logits processors: penalties and bans that change a sequence's logits before a token is picked. Those of pace edit a
few logits each.

Order and meaning follow transformers (`generation/logits_process.py`), one sequence at a time: a row `[V]` of fp32,
changed in place. OpenAI's penalties come right after the repetition penalty, where transformers would have them.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.sequence import Span, fork_by_copy
from pace.ops.draws import Edits


class LogitsProcessor:
    """Changes logits depending on the tokens so far: a penalty, a ban.

    One object serves one sequence: each gets a `fork()` of those in `SamplingConfig(logits_processors=[...])`. `accept`
    receives each new token of prompt and output, then `apply` changes the logits of the next. `rollback` undoes
    tokens that a step callback removed, or that a repeated step computes again.

    Subclasses define `apply`. Those with state define the other two: after `rollback(n)` the state must equal that
    before the last n calls of `accept`.
    """

    seen: list[int]
    """Tokens accepted and not rolled back. During `accept` and `rollback`, those before the call. Must not be changed:
    the processors of a sequence share it."""
    num_prompt_tokens: int
    """Number of prompt tokens, at the start of `seen`. Set before the first `accept`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LogitsProcessor:
        processor = super().__new__(cls)
        processor.seen = []
        processor.num_prompt_tokens = 0
        return processor

    def apply(self, logits: Tensor) -> None:
        """Changes `logits [V]`, fp32, of the token after `self.seen`, in place."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(logits)")

    def accept(self, token: int) -> None:
        """Receives the next token, of the prompt or generated."""

    def rollback(self, num_tokens: int) -> None:
        """Undoes the last `num_tokens` accepted tokens, which are `self.seen[-num_tokens:]`."""

    def fork(self) -> LogitsProcessor:
        """Returns a second processor that has accepted the same tokens; later changes of one must not show in the
        other.

        By default a shallow copy that also copies lists, dicts, sets and other Python containers among the attributes,
        but not their items. A processor with deeper state overrides this."""
        return fork_by_copy(self)

    # -- use without a sequence ----------------------------------------------------------------------------------------

    def sync(self, tokens: list[int]) -> None:
        """Changes the state to that after `tokens`: rolls back the tokens that differ, and accepts the new ones."""
        num_kept = next(
            (index for index, pair in enumerate(zip(self.seen, tokens)) if pair[0] != pair[1]),
            min(len(tokens), len(self.seen)),
        )
        if num_kept < len(self.seen):
            self.rollback(len(self.seen) - num_kept)
            del self.seen[num_kept:]
        for token in tokens[num_kept:]:
            self.accept(token)
            self.seen.append(token)

    def process_(self, logits: Tensor) -> None:
        """Changes `logits [V]` in place. Raises TypeError if `apply` returns its result."""
        result = self.apply(logits)
        if result is not None and result is not logits:
            raise TypeError(
                f"{type(self).__name__}.apply must change the logits in place and return None, got "
                f"{type(result).__name__}; use logits.copy_(...)"
            )

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Runs like a processor of transformers, for one sequence: changes and returns logits `[1, V]`, given ids `[1,
        S]`."""
        self.sync(input_ids[0].tolist())
        self.process_(logits[0])
        return logits


class SparseProcessor(LogitsProcessor):
    """Changes the logits of a few tokens and names them, so that the draw of a whole step applies all edits at once.

    Subclasses define `edits`, and keep them up to date in `accept` and `rollback`."""

    def edits(self) -> Edits:
        """Returns the changes for the token after `self.seen`; valid until the next call of any method. Only bans may
        name a token twice."""
        raise NotImplementedError(f"{type(self).__name__} must define edits()")

    def apply(self, logits: Tensor) -> None:
        self.edits().apply_(logits.numpy())

    @property
    def is_sparse(self) -> bool:
        """False for a subclass that overrides `apply`."""
        return type(self).apply is SparseProcessor.apply

    def fork(self) -> SparseProcessor:
        fork = fork_by_copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Edits):
                setattr(fork, name, value.copy())
        return fork


def bans(tokens: Sequence[int] | np.ndarray) -> Edits:
    """Returns edits that ban all of `tokens`."""
    return Edits(tokens, addend=-math.inf)


NOTHING = Edits()


class LogitBias(SparseProcessor):
    """Adds a bias to some tokens; -inf bans."""

    def __init__(self, bias: dict[int, float]) -> None:
        self._edits = Edits(list(bias), addend=list(bias.values()))

    def edits(self) -> Edits:
        return self._edits


class _Occurrences(SparseProcessor):
    """Keeps one edit for each token that occurs from position `start` on, in the order of first occurrence. So
    rolled-back tokens are at the end."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.counts: dict[int, int] = {}
        self.places: dict[int, int] = {}
        self._edits = Edits()

    def edits(self) -> Edits:
        return self._edits

    def edit(self, count: int) -> tuple[float, float]:
        """Returns factor and addend of a token that occurs `count` times."""
        raise NotImplementedError

    def accept(self, token: int) -> None:
        if len(self.seen) < self.start:
            return
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if count == 1:
            self.places[token] = len(self._edits)
            self._edits.append(token, *self.edit(1))
        else:
            self._edits.set_addend(self.places[token], self.edit(count)[1])

    def rollback(self, num_tokens: int) -> None:
        for token in reversed(self.seen[max(self.start, len(self.seen) - num_tokens) :]):
            count = self.counts[token] = self.counts[token] - 1
            if count:
                self._edits.set_addend(self.places[token], self.edit(count)[1])
            else:
                del self.counts[token]
                self._edits.truncate(self.places.pop(token))


class RepetitionPenalty(_Occurrences):
    """Computes `x / penalty` for positive and `x * penalty` for negative logits of every token in prompt or output
    (arXiv:1909.05858)."""

    def __init__(self, penalty: float) -> None:
        super().__init__(start=0)
        self.penalty = penalty

    def edit(self, count: int) -> tuple[float, float]:
        return self.penalty, 0.0


class FrequencyPresencePenalty(_Occurrences):
    """Computes `x - frequency * count - presence * (count > 0)`, counting generated tokens only, as in OpenAI's API."""

    def __init__(self, frequency: float, presence: float, num_prompt_tokens: int) -> None:
        super().__init__(start=num_prompt_tokens)
        self.frequency, self.presence = frequency, presence

    def edit(self, count: int) -> tuple[float, float]:
        return 1.0, -(self.frequency * count + self.presence)


class NoRepeatNgram(SparseProcessor):
    """Bans every token that would complete a run of `size` tokens seen before, in prompt or output."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.followers: dict[tuple[int, ...], array[int]] = {}

    def accept(self, token: int) -> None:
        if len(self.seen) >= self.size - 1:
            self.followers.setdefault(self._prefix(len(self.seen)), array("i")).append(token)

    def rollback(self, num_tokens: int) -> None:
        for end in range(len(self.seen) - 1, len(self.seen) - 1 - num_tokens, -1):
            if end >= self.size - 1:
                self.followers[self._prefix(end)].pop()

    def edits(self) -> Edits:
        followers = self.followers.get(self._prefix(len(self.seen))) if len(self.seen) >= self.size - 1 else None
        return bans(np.array(followers, np.int32)) if followers else NOTHING

    def fork(self) -> NoRepeatNgram:
        fork = super().fork()
        fork.followers = {prefix: tokens[:] for prefix, tokens in self.followers.items()}
        return fork

    def _prefix(self, end: int) -> tuple[int, ...]:
        """Returns the first `size - 1` tokens of the run whose last token is at position `end`."""
        return tuple(self.seen[end + 1 - self.size : end])


class BadWords(SparseProcessor):
    """Bans the last token of each word when the tokens so far end with the rest of it."""

    def __init__(self, words: list[list[int]]) -> None:
        self.always = sorted({word[0] for word in words if len(word) == 1})
        self.completions = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._always = bans(self.always)

    def edits(self) -> Edits:
        last = [last for prefix, last in self.completions if self.seen[-len(prefix) :] == prefix]
        return bans(self.always + last) if last else self._always


class MinNewTokens(SparseProcessor):
    """Bans end tokens until `minimum` tokens are generated."""

    def __init__(self, minimum: int, end_tokens: list[int], num_prompt_tokens: int) -> None:
        self.until = num_prompt_tokens + minimum
        self.end_tokens = end_tokens
        self._bans = bans(end_tokens)

    def edits(self) -> Edits:
        return self._bans if len(self.seen) < self.until else NOTHING


class CallableProcessor(LogitsProcessor):
    """Wraps a callable as a processor, called like one of transformers: (input_ids [1, S], logits [1, V]) -> logits [1,
    V].

    It keeps no state, so verifying drafts calls it again with other ids: its result must depend only on its arguments.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def apply(self, logits: Tensor) -> None:
        result = self.function(torch.tensor([self.seen], dtype=torch.int64), logits[None])
        if not isinstance(result, Tensor) or result.numel() != logits.numel():
            got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise TypeError(f"logits processor {self.function!r} must return logits [1, {logits.numel()}], got {got}")
        logits.copy_(result.reshape(-1))


def build_processors(config: SamplingConfig, num_prompt_tokens: int, end_tokens: list[int]) -> list[LogitsProcessor]:
    """Returns the processors that `config` asks for, in transformers' order; empty if it asks for none."""
    processors: list[LogitsProcessor] = []
    if config.logit_bias:
        processors.append(LogitBias(config.logit_bias))
    if config.repetition_penalty != 1.0:
        processors.append(RepetitionPenalty(config.repetition_penalty))
    if config.frequency_penalty or config.presence_penalty:
        processors.append(
            FrequencyPresencePenalty(config.frequency_penalty, config.presence_penalty, num_prompt_tokens)
        )
    if config.no_repeat_ngram_size:
        processors.append(NoRepeatNgram(config.no_repeat_ngram_size))
    if config.bad_words_ids:
        processors.append(
            BadWords([word for word in config.bad_words_ids if word not in [[token] for token in end_tokens]])
        )
    if config.suppress_tokens:
        processors.append(BadWords([[token] for token in config.suppress_tokens]))
    if config.min_new_tokens and end_tokens:
        processors.append(MinNewTokens(config.min_new_tokens, end_tokens, num_prompt_tokens))
    for function in config.logits_processors or ():
        processors.append(function.fork() if isinstance(function, LogitsProcessor) else CallableProcessor(function))
    for processor in processors:
        processor.num_prompt_tokens = num_prompt_tokens
    return processors


class Processors:
    """The processors of one sequence, in order, and the tokens they have all accepted.

    They follow incrementally: tokens of a sequence only grow while it is in the engine, so accepted tokens are not read
    again.
    """

    def __init__(self, processors: list[LogitsProcessor], seen: list[int] | None = None) -> None:
        """Takes ownership of `processors`, which have accepted the tokens `seen`. If `seen` is None, rolls back
        everything they have accepted."""
        self._processors = processors
        self._seen = [] if seen is None else seen
        for processor in processors:
            if seen is None:
                processor.sync([])
            processor.seen = self._seen

    def __bool__(self) -> bool:
        return bool(self._processors)

    def fork(self) -> Processors:
        """Returns the processors for a second sequence with the same tokens."""
        return Processors([processor.fork() for processor in self._processors], list(self._seen))

    def follow(self, tokens: list[int]) -> None:
        """Accepts the new ones of `tokens`, prompt and output; all before were accepted already. If `tokens` are fewer
        (an interrupted step is repeated), rolls back the rest."""
        num_seen = len(self._seen)
        if num_seen > len(tokens):
            num_dropped = num_seen - len(tokens)
            for processor in self._processors:
                processor.rollback(num_dropped)
            del self._seen[len(tokens) :]
        elif self._processors:
            for token in tokens[num_seen:]:
                self.accept(token)

    def accept(self, token: int) -> None:
        """Passes the next token to each processor."""
        for processor in self._processors:
            processor.accept(token)
        if self._processors:
            self._seen.append(token)

    @property
    def are_sparse(self) -> bool:
        """True if `edits` covers all that the processors do."""
        return all(isinstance(processor, SparseProcessor) and processor.is_sparse for processor in self._processors)

    def edits(self) -> list[Edits]:
        """Returns the changes for the next token if all are sparse; valid until the next token is accepted."""
        return [processor.edits() for processor in self._processors]

    def edits_of(self, span: Span) -> list[list[Edits]]:
        """Returns the edits for each wanted row of a span, assuming the drafts before it are accepted."""
        tokens, drafts = span.sequence.tokens, span.drafts
        self.follow(tokens)
        if not drafts:
            return [self.edits()]
        rows: list[list[Edits]] = []
        for number in range(len(drafts) + 1):
            if number >= span.num_certain:
                rows.append([edits.copy() for edits in self.edits()])
            if number < len(drafts):
                self.accept(drafts[number])
        self.follow(tokens)
        return rows

    def apply_(self, logits: Tensor) -> None:
        """Changes `logits [V]` of the next token in place."""
        for processor in self._processors:
            processor.process_(logits)
