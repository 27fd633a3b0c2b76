"""What changes a sequence's logits before a token is picked: penalties and bans, then the filters of sampling.

Order and meaning are those of transformers (`generation/logits_process.py`), one sequence at a time: a row `[V]` of
fp32, changed in place. OpenAI's penalties stand beside the repetition penalty, where transformers would have them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.decoding.forking import fork_by_copy


class LogitsProcessor:
    """Changes logits in the light of the tokens so far: a penalty, a ban.

    One object serves one sequence: each gets a `fork()` of what `SamplingConfig(logits_processors=[...])` names.
    `accept` receives each new token of prompt and output, then `apply` changes the logits of the next. `rollback` takes
    back a proposed token that was verified and dropped.

    Subclasses define `apply`. Those with state define the other two: after `rollback(n)` the state must be what it was
    before the last n calls of `accept`.
    """

    seen: list[int]
    """Tokens accepted and not rolled back. During `accept` and `rollback`, those before the call. Not to be changed:
    the processors of a sequence share it."""
    num_prompt_tokens: int
    """How many of the first tokens are the prompt. Set before the first `accept`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> LogitsProcessor:
        processor = super().__new__(cls)
        processor.seen = []
        processor.num_prompt_tokens = 0
        return processor

    def apply(self, logits: Tensor) -> None:
        """Changes `logits [V]`, fp32, in place: those of the token that comes after `self.seen`."""
        raise NotImplementedError(f"{type(self).__name__} must define apply(logits)")

    def accept(self, token: int) -> None:
        """Takes note of the next token, of the prompt or generated."""

    def rollback(self, num_tokens: int) -> None:
        """Forgets the last `num_tokens` accepted tokens, which are `self.seen[-num_tokens:]`."""

    def fork(self) -> LogitsProcessor:
        """A second processor that has accepted the same tokens; what either does later must not show in the other.

        By default a shallow copy, in which lists, dicts, sets and other containers of Python that are attributes are
        copied too, but not what they hold. A processor with state that lies deeper overrides this."""
        return fork_by_copy(self)

    # -- by itself, without a sequence
    # -----------------------------------------------------------------------------------

    def sync(self, tokens: list[int]) -> None:
        """Brings the state to `tokens`, whatever they are: rolls back from the end what differs, accepts what is
        new."""
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
        """Changes `logits [V]` in place. Raises TypeError where `apply` returns its result."""
        result = self.apply(logits)
        if result is not None and result is not logits:
            raise TypeError(
                f"{type(self).__name__}.apply must change the logits in place and return None, got {type(result).__name__}; use logits.copy_(...)"
            )

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """As transformers calls a processor, for one sequence: ids `[1, S]` and logits `[1, V]`, which are changed and
        returned."""
        self.sync(input_ids[0].tolist())
        self.process_(logits[0])
        return logits


class LogitBias(LogitsProcessor):
    """Adds a bias to some tokens; -inf bans."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.tokens = torch.tensor(list(bias), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()), dtype=torch.float32)

    def apply(self, logits: Tensor) -> None:
        logits.index_add_(0, self.tokens, self.values)


class _Occurrences(LogitsProcessor):
    """Counts tokens from position `start` on."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.counts: Counter[int] = Counter()

    def accept(self, token: int) -> None:
        if len(self.seen) >= self.start:
            self.counts[token] += 1

    def rollback(self, num_tokens: int) -> None:
        for token in self.seen[max(self.start, len(self.seen) - num_tokens) :]:
            self.counts[token] -= 1
            if not self.counts[token]:
                del self.counts[token]


class RepetitionPenalty(_Occurrences):
    """`x / penalty` for positive and `x * penalty` for negative logits of every token in prompt or output
    (arXiv:1909.05858)."""

    def __init__(self, penalty: float) -> None:
        super().__init__(start=0)
        self.penalty = penalty

    def apply(self, logits: Tensor) -> None:
        seen = torch.tensor([token for token in self.counts if token < logits.shape[0]], dtype=torch.int64)
        values = logits[seen]
        logits[seen] = torch.where(values < 0, values * self.penalty, values / self.penalty)


class FrequencyPresencePenalty(_Occurrences):
    """`x - frequency * count - presence * (count > 0)`, counting generated tokens only, as in OpenAI's API."""

    def __init__(self, frequency: float, presence: float, num_prompt_tokens: int) -> None:
        super().__init__(start=num_prompt_tokens)
        self.frequency, self.presence = frequency, presence

    def apply(self, logits: Tensor) -> None:
        if self.counts:
            seen = torch.tensor(list(self.counts), dtype=torch.int64)
            counts = torch.tensor(list(self.counts.values()), dtype=torch.float32)
            logits[seen] -= self.frequency * counts + self.presence


class NoRepeatNgram(LogitsProcessor):
    """Bans every token that would complete a run of `size` tokens seen before, in prompt or output."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.followers: dict[tuple[int, ...], list[int]] = {}

    def accept(self, token: int) -> None:
        if len(self.seen) >= self.size - 1:
            self.followers.setdefault(self._prefix(len(self.seen)), []).append(token)

    def rollback(self, num_tokens: int) -> None:
        for end in range(len(self.seen) - 1, len(self.seen) - 1 - num_tokens, -1):
            if end >= self.size - 1:
                self.followers[self._prefix(end)].pop()

    def apply(self, logits: Tensor) -> None:
        if len(self.seen) >= self.size - 1:
            logits[
                [token for token in self.followers.get(self._prefix(len(self.seen)), ()) if token < logits.shape[0]]
            ] = -math.inf

    def fork(self) -> NoRepeatNgram:
        twin = fork_by_copy(self)
        twin.followers = {prefix: list(tokens) for prefix, tokens in self.followers.items()}
        return twin

    def _prefix(self, end: int) -> tuple[int, ...]:
        """The first `size - 1` tokens of the run whose last token stands at position `end`."""
        return tuple(self.seen[end + 1 - self.size : end])


class BadWords(LogitsProcessor):
    """Bans the last token of each run where the tokens so far end with the rest of it."""

    def __init__(self, words: list[list[int]]) -> None:
        self.always = sorted({word[0] for word in words if len(word) == 1})
        self.completions = [(word[:-1], word[-1]) for word in words if len(word) > 1]

    def apply(self, logits: Tensor) -> None:
        banned = self.always + [last for prefix, last in self.completions if self.seen[-len(prefix) :] == prefix]
        logits[banned] = -math.inf


class MinNewTokens(LogitsProcessor):
    """Bans end tokens until `minimum` tokens are generated."""

    def __init__(self, minimum: int, end_tokens: list[int], num_prompt_tokens: int) -> None:
        self.until = num_prompt_tokens + minimum
        self.end_tokens = end_tokens

    def apply(self, logits: Tensor) -> None:
        if len(self.seen) < self.until:
            logits[self.end_tokens] = -math.inf


class CallableProcessor(LogitsProcessor):
    """A callable in the place of a processor, called as transformers calls its own: (input_ids [1, S], logits [1, V])
    -> logits [1, V].

    It keeps no state here, so verifying drafts calls it again with other ids: its answer must depend on what it is
    given alone.
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
    """The processors that `config` asks for, in transformers' order; empty where it asks for none."""
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
    if config.min_new_tokens and end_tokens:
        processors.append(MinNewTokens(config.min_new_tokens, end_tokens, num_prompt_tokens))
    for function in config.logits_processors or ():
        processors.append(function.fork() if isinstance(function, LogitsProcessor) else CallableProcessor(function))
    for processor in processors:
        processor.num_prompt_tokens = num_prompt_tokens
    return processors


class Processors:
    """The processors of one sequence, in their order, and the tokens that they have all accepted.

    They follow incrementally: the tokens of a sequence only grow while it is in the engine, so that what was accepted
    is not looked at again.
    """

    def __init__(self, processors: list[LogitsProcessor], seen: list[int] | None = None) -> None:
        """`processors`, which are this object's from now on, have accepted the tokens `seen`; without, those that each
        has accepted are taken back."""
        self._processors = processors
        self._seen = [] if seen is None else seen
        for processor in processors:
            if seen is None:
                processor.sync([])
            processor.seen = self._seen

    def __bool__(self) -> bool:
        return bool(self._processors)

    def fork(self) -> Processors:
        """Those of a second sequence with the same tokens."""
        return Processors([processor.fork() for processor in self._processors], list(self._seen))

    def follow(self, tokens: list[int]) -> None:
        """Accepts what is new of `tokens`, prompt and output, of which all before was accepted already. Where they are
        fewer than that (a step was broken off and is done again), takes back the rest."""
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
        """Takes note of the next token."""
        for processor in self._processors:
            processor.accept(token)
        if self._processors:
            self._seen.append(token)

    def apply_(self, logits: Tensor) -> None:
        """Changes `logits [V]`, those of the next token, in place."""
        for processor in self._processors:
            processor.process_(logits)


# ---------------------------------------------------------------------------------------------------------------------
# Filters of sampling


Filter = Callable[[Any, Tensor], None]
"""(ops, logits [V]): sets what is filtered out to -inf, in place."""


def build_filters(config: SamplingConfig, num_spared: int = 1) -> list[Filter]:
    """Temperature, top_k and top_p, min_p, typical_p, in this order, as far as `config` asks for them; none for greedy.
    Each leaves at least `num_spared` tokens: beam search wants one more than there are end tokens."""
    filters: list[Filter] = []
    if not config.do_sample:
        return filters
    if config.temperature != 1.0:
        filters.append(divide_by_temperature(config.temperature))
    if config.top_k or config.top_p < 1.0:
        top_k = torch.tensor([config.top_k and max(config.top_k, num_spared)], dtype=torch.int64)
        top_p = torch.tensor([config.top_p], dtype=torch.float32)
        filters.append(sparing(num_spared, lambda ops, logits: ops.top_k_top_p_(logits[None], top_k, top_p)))
    if config.min_p:
        filters.append(sparing(num_spared, lambda ops, logits: keep_min_p_(ops, logits, config.min_p)))
    if config.typical_p < 1.0:
        filters.append(lambda ops, logits: keep_typical_(ops, logits, config.typical_p, num_spared))
    return filters


def sparing(count: int, filter_: Filter) -> Filter:
    """The filter, but the `count` largest logits stay. (A filter by itself leaves the largest.)"""
    if count == 1:
        return filter_

    def spare_(ops: Any, logits: Tensor) -> None:
        numbers = logits.numpy()
        spared = largest(numbers, count)
        values = numbers[spared]
        filter_(ops, logits)
        numbers[spared] = values

    return spare_


_PIECE = 64
"""Numbers of which only the largest is looked at, to find a bound for the largest of all: 152k of them in 0.1 ms,
sorted in 10."""


def largest(numbers: np.ndarray, count: int) -> np.ndarray:
    """int64: where the `count` largest of `numbers [V]` are, largest first, the lower index first among equals; fewer
    where fewer are above -inf. There is no NaN among them."""
    num_pieces = len(numbers) // _PIECE
    candidates = np.arange(len(numbers))
    if num_pieces > count:
        maxima = numbers[: num_pieces * _PIECE].reshape(_PIECE, num_pieces).max(axis=0)
        candidates = np.flatnonzero(
            numbers >= np.partition(maxima, -count)[-count]
        )  # at least `count`: one in each of the best pieces
    candidates = candidates[numbers[candidates] > -math.inf]
    return candidates[np.argsort(-numbers[candidates], kind="stable")[:count]]


def divide_by_temperature(temperature: float) -> Filter:
    def divide_(ops: Any, logits: Tensor) -> None:
        numbers = logits.numpy()
        numbers /= np.float32(temperature)

    return divide_


def keep_min_p_(ops: Any, logits: Tensor, min_p: float) -> None:
    """Filters tokens less than `min_p` times as likely as the most likely one."""
    probabilities = ops.softmax(logits[None])[0].numpy()
    top = probabilities.argmax()
    outside = probabilities < np.float32(min_p) * probabilities[top]
    outside[top] = False
    logits.numpy()[outside] = -math.inf


def keep_typical_(ops: Any, logits: Tensor, mass: float, num_spared: int = 1) -> None:
    """Keeps the tokens whose information is closest to the entropy, up to `mass` of the probability (arXiv:2202.00666),
    and at least `num_spared`."""
    log_probabilities = ops.log_softmax(logits[None])[0]
    probabilities = log_probabilities.exp()
    entropy = -(log_probabilities * probabilities).nansum()
    distance, order = (-log_probabilities - entropy).abs().sort()
    cumulative = probabilities[order].cumsum(0)
    last = min(int((cumulative < mass).sum()), logits.shape[0] - 1)
    outside = distance > distance[last]
    outside[:num_spared] = False
    logits[order[outside]] = -math.inf
