"""Logits in, accepted tokens out. Each sequence brings a strategy; those that want the largest alone share one call.

Work on a whole vocabulary is a kernel of `pace.ops`, or numpy's: torch would share it among threads of its own, and
waiting for those costs more than the work where cores are few (benchmarks/RESULTS.md, "Sampling under load").
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pace.llm.decoding.logits import Filter, Processors
from pace.llm.decoding.mask_filler import NO_MASKS, MaskFiller, NoMasks, PendingMasks
from pace.llm.sequence import Sequence, Span, TokenLogprob


class DecodingStrategy(Protocol):
    """What becomes of the logits of one sequence. Made anew for each sequence."""

    wants_argmax_only: bool
    """True where `choose` would do nothing but take the largest logit; the sampler then does that for all such rows at
    once."""
    takes_drafts: bool
    """True where the sequence goes on with a token of each row, so that drafts may be verified; `guess` and
    `needs_every_row` are then there, too."""
    needs_every_row: bool
    """True where it looks at the logits even of a place where the sequence's mask leaves a single token."""

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        """Takes `logits [rows, V]` of the span's wanted rows, as its mask leaves them, which it must not keep or
        change, and returns the tokens that the sequence goes on with: none, one, or one more than the drafts it
        accepts. The last rows may be missing, where they are of drafts and no token can be picked from them. Changes no
        token list."""
        ...


class Greedy:
    """The most likely token, with nothing in its way."""

    wants_argmax_only = True
    takes_drafts = True
    needs_every_row = False

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        return accept_drafts(ops.argmax(logits).tolist(), span)

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        return int(ops.argmax(logits[None])[0])


class Sampling:
    """Processors, then filters and a draw, or the largest where nothing is to be drawn; log-probabilities where asked.

    A draw depends on the seed and on how many tokens were generated before, on nothing else. Drafts are verified by
    drawing the token of each row and going on while it is the drafted one: the tokens are those that would have been
    drawn without. A row that fails after others ends there: the sequence may be done by then, and else it fails in the
    next step's first row.
    """

    wants_argmax_only = False
    takes_drafts = True

    def __init__(
        self, processors: Processors, filters: list[Filter], seed: int | None, num_logprobs: int | None
    ) -> None:
        """`processors` and `filters` are those of `logits.py`; without a seed the largest logit is taken;
        `num_logprobs` most likely tokens are recorded beside the chosen one, None for no record."""
        self.processors = processors
        self.filters = filters
        self.seed = seed
        self.num_logprobs = num_logprobs
        self.needs_every_row = bool(processors) or num_logprobs is not None

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        sequence, drafts = span.sequence, span.drafts
        chosen = drafts[: span.num_certain]
        num_unseen = len(chosen)
        self.processors.follow(sequence.tokens)
        for row in range(logits.shape[0]):
            try:
                if row:
                    self.processors.accept(chosen[-1])
                token = self._choose_one(ops, logits[row], sequence, len(chosen))
            except Exception:
                if not chosen:
                    raise
                break
            chosen.append(token)
            if row + num_unseen == len(drafts) or token != drafts[row + num_unseen]:
                break
        return chosen

    def _choose_one(self, ops: Any, given: Tensor, sequence: Sequence, num_ahead: int) -> int:
        """The token after the sequence's and `num_ahead` others."""
        num_generated = sequence.num_generated + num_ahead
        logits = torch.from_numpy(given.numpy().copy())
        self.processors.apply_(logits)
        largest = int(ops.argmax(logits[None])[0])
        if largest < 0 or logits[largest] == -math.inf:
            raise ValueError(
                f"after {num_generated} generated tokens no token is left to pick: all logits are -inf, or one is NaN or inf; "
                f"loosen bad_words_ids, logit_bias, no_repeat_ngram_size, the logits_processors or the token_mask"
            )
        token = self._draw(ops, logits, num_generated)
        if self.num_logprobs is not None:
            del sequence.logprobs[num_generated:]
            sequence.logprobs.append(token_logprob(ops, given, token, self.num_logprobs))
        return token

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        """The token after `num_generated` others if `logits [V]`, which are a draft model's and are not changed, were
        the model's. Processors are not asked: they hear of each token once, and of none that does not come true."""
        return self._draw(ops, torch.from_numpy(logits.numpy().copy()), num_generated)

    def _draw(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        """Filters `logits` in place, and picks."""
        for keep_ in self.filters:
            keep_(ops, logits)
        if self.seed is None:
            return int(ops.argmax(logits[None])[0])
        return draw(ops.softmax(logits[None])[0], uniform(self.seed, num_generated))


class PromptLogprobs:
    """Records the log-probabilities of a prompt's tokens, which needs `wanted_from = 0`, and then gives its place to
    `strategy`."""

    wants_argmax_only = False
    takes_drafts = False

    def __init__(self, strategy: DecodingStrategy, num_top: int) -> None:
        """`num_top` most likely tokens are recorded beside each token of the prompt."""
        self.strategy = strategy
        self.num_top = num_top

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        sequence = span.sequence
        first = span.end - logits.shape[0]
        num_known = min(
            logits.shape[0], len(sequence.tokens) - 1 - first
        )  # rows that a token of the prompt comes after
        for row, token in enumerate(sequence.tokens[first + 1 : first + 1 + num_known]):
            sequence.prompt_logprobs[first + 1 + row] = token_logprob(ops, logits[row], token, self.num_top)
        if num_known == logits.shape[0]:
            return []
        sequence.strategy, sequence.wanted_from = self.strategy, None
        return self.strategy.choose(ops, logits[num_known:], span)


class Sampler:
    """Turns the logits of one step into the tokens each span goes on with."""

    def __init__(self, ops: Any, vocab_size: int) -> None:
        self.ops = ops
        self._masks = MaskFiller(vocab_size)

    def prepare(self, spans: list[Span]) -> PendingMasks | NoMasks:
        """Before the model runs: drops the drafts that the masks of their sequences do not allow, and starts to compute
        the masks of the rows that `sample` will get. They are waited for there, and by the end of the `with` block that
        the result is to be used in."""
        return self._masks.prepare(spans)

    def sample(self, logits: Tensor, spans: list[Span], pending: PendingMasks | NoMasks = NO_MASKS) -> list[list[int]]:
        """Returns the tokens accepted for each span. `logits [R, V]` holds the wanted rows of the spans, one span after
        the other, and is changed: what the masks do not allow is -inf.

        A sequence whose logits are not finite, whose mask raises or allows nothing, or whose strategy raises, fails
        alone: its `error` is set and it gets no tokens.
        """
        if not logits.shape[0]:
            return [[] for _ in spans]
        failures = pending.apply_(self.ops, logits)
        largest = self.ops.argmax(logits).tolist()
        if pending.rows:
            self._note_failures(logits, pending.rows, largest, failures)
        outcomes: list[list[int]] = []
        row = 0
        for span in spans:
            outcomes.append([])
            num_rows = span.num_rows
            if num_rows:
                try:
                    outcomes[-1] = self._choose(logits, largest, row, num_rows, span, failures)
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as error:  # a panic of a library in Rust is no Exception
                    span.sequence.fail(error)
                row += num_rows
        return outcomes

    def _note_failures(
        self, logits: Tensor, masked: list[int], largest: list[int], failures: dict[int, Exception]
    ) -> None:
        """Adds the rows for which a mask leaves nothing, and sets `largest` to -1 for all that failed."""
        left = logits.numpy()[masked, [largest[row] for row in masked]]
        for row, value in zip(masked, left):
            if value == -math.inf and largest[row] >= 0 and row not in failures:
                failures[row] = ValueError(
                    "no token is left to pick: the token_mask allows none, or none that the model does not rule out"
                )
        for row in failures:
            largest[row] = -1

    def _choose(
        self,
        logits: Tensor,
        largest: list[int],
        row: int,
        num_rows: int,
        span: Span,
        failures: dict[int, Exception],
    ) -> list[int]:
        """The tokens of one span, whose rows begin at `row`. Those of drafts beyond the first one that is not finite
        are left out; before, there must be none."""
        strategy = span.sequence.strategy
        own = largest[row : row + num_rows]
        if min(own) < 0:
            num_finite = next(index for index, token in enumerate(own) if token < 0)
            if num_finite < num_rows - (len(span.drafts) - span.num_certain):
                if span.num_certain:
                    return span.drafts[: span.num_certain]
                raise failures.get(row + num_finite) or not_finite(span.sequence)
            own = own[:num_finite]
        if strategy.wants_argmax_only:
            return accept_drafts(own, span)
        return strategy.choose(self.ops, logits[row : row + len(own)], span)


def accept_drafts(chosen: list[int], span: Span) -> list[int]:
    """The certain drafts of a span, then of the tokens `chosen` by the rows after them those up to and including the
    first that is not the one drafted."""
    drafts = span.drafts
    if not drafts:
        return chosen
    tokens = drafts[: span.num_certain]
    for token in chosen:
        tokens.append(token)
        if len(tokens) > len(drafts) or token != drafts[len(tokens) - 1]:
            break
    return tokens


def not_finite(sequence: Sequence) -> ValueError:
    """What a sequence fails with where the model gave NaN or +inf. (-inf is a ban, which a model may state.)"""
    return ValueError(
        f"the model's logits are not finite (NaN or inf) after {len(sequence.tokens)} tokens; the weights may be damaged, "
        f"or the dtype too narrow: try dtype=float32"
    )


def token_logprob(ops: Any, logits: Tensor, token: int, num_top: int) -> TokenLogprob:
    """The log-probability of `token` under `logits [V]`, and of the `num_top` most likely tokens."""
    log_probabilities = ops.log_softmax(logits[None])[0]
    values, tokens = log_probabilities.topk(num_top)
    return TokenLogprob(token, float(log_probabilities[token]), tuple(zip(tokens.tolist(), values.tolist())))


# ---------------------------------------------------------------------------------------------------------------------
# Chance

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """The finaliser of splitmix64: 64 bits in, 64 well-spread bits out. Source: Steele, Lea, Flood, OOPSLA 2014."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), the index-th of the seed's stream, computed from the two alone: nothing to rewind or to
    keep."""
    return (mix((mix((seed + 1) & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def draw(probabilities: Tensor, threshold: float) -> int:
    """The first token at which the cumulative probability exceeds `threshold` (in [0, 1)) of the total. In float64,
    over the tokens of nonzero probability in rising order of their ids."""
    numbers = probabilities.numpy()
    candidates = np.flatnonzero(numbers > 0)
    cumulative = np.cumsum(numbers[candidates], dtype=np.float64)
    index = int(np.searchsorted(cumulative, threshold * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])
