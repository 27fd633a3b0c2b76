"""Logits in, accepted tokens out. Each sequence brings a strategy; those that want the largest alone share one call.

Work on a whole vocabulary is a kernel of `pace.ops`, or numpy's: torch would share it among threads of its own, and
waiting for those costs more than the work where cores are few (benchmarks/RESULTS.md, "Sampling under load").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.decoding.logits import Processors
from pace.llm.decoding.mask_filler import NO_MASKS, MaskFiller, NoMasks, PendingMasks
from pace.llm.sequence import Sequence, Span, TokenLogprob
from pace.ops.draws import Draws


class DecodingStrategy(Protocol):
    """What becomes of the logits of one sequence. Made anew for each sequence."""

    is_picked: bool
    """True where `choose` would do nothing but draw by `rules`, accept drafts, and record `num_logprobs`; the sampler
    then does that for all such rows at once."""
    rules: Rules | None
    """Which tokens may be drawn; None where the largest is taken."""
    seed: int
    num_logprobs: int | None
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

    is_picked = True
    rules = num_logprobs = None
    seed = 0
    takes_drafts = True
    needs_every_row = False

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        return accept_drafts(ops.argmax(logits).tolist(), span)

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        return int(ops.argmax(logits[None])[0])


@dataclass(frozen=True, slots=True)
class Rules:
    """Which tokens may be drawn: the fields of `SamplingConfig` of these names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, config: SamplingConfig) -> Rules | None:
        """None where nothing is to be drawn."""
        return cls(*(getattr(config, field.name) for field in fields(cls))) if config.do_sample else None


class Sampling:
    """Processors, then a draw by rules, or the largest where nothing is to be drawn; log-probabilities where asked.

    A draw depends on the seed and on how many tokens were generated before, on nothing else. Drafts are verified by
    drawing the token of each row and going on while it is the drafted one: the tokens are those that would have been
    drawn without. A row that fails after others ends there: the sequence may be done by then, and else it fails in the
    next step's first row.
    """

    takes_drafts = True

    def __init__(
        self, processors: Processors, rules: Rules | None = None, seed: int = 0, num_logprobs: int | None = None
    ) -> None:
        """Without rules the largest logit is taken; `num_logprobs` most likely tokens are recorded beside the chosen
        one, None for no record."""
        self.processors = processors
        self.rules = rules
        self.seed = seed
        self.num_logprobs = num_logprobs
        self.is_picked = not processors
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
        token = self.guess(ops, logits, num_generated)
        if token < 0 or logits[token] == -math.inf:
            raise nothing_left(num_generated)
        if self.num_logprobs is not None:
            record(ops, given[None], [Chosen(0, sequence, num_generated, token, self.num_logprobs)], self.num_logprobs)
        return token

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        """The token after `num_generated` others if `logits [V]` were the model's, after the processors; -1 where none
        is left. Of a draft model's logits, processors are not asked: they hear of each token once, and of none that does
        not come true."""
        if self.rules is None:
            return int(ops.argmax(logits[None])[0])
        return int(ops.sample(logits[None], draws([self.rules], [uniform(self.seed, num_generated)]))[0])


LARGEST = Rules(temperature=0.0)
"""Rules of a row from which nothing is drawn."""


def draws(rules: list[Rules], places: list[float]) -> Draws:
    """How a token of each row is drawn: by which rules, and at which place of the cumulative probability."""
    return Draws(
        rows=torch.arange(len(rules)),
        temperature=torch.tensor([rule.temperature for rule in rules]),
        top_k=torch.tensor([rule.top_k for rule in rules]),
        top_p=torch.tensor([rule.top_p for rule in rules]),
        min_p=torch.tensor([rule.min_p for rule in rules]),
        typical_p=torch.tensor([rule.typical_p for rule in rules]),
        uniform=torch.tensor(places, dtype=torch.float64),
    )


def record(ops: Any, logits: Tensor, chosen: list[Chosen], num_top: int) -> None:
    """Notes the log-probabilities of chosen tokens, with the `num_top` most likely ones beside each."""
    rows, tokens = torch.tensor([one.row for one in chosen]), torch.tensor([one.token for one in chosen])
    for one, logprob in zip(chosen, token_logprobs(ops, logits, rows, tokens, num_top)):
        del one.sequence.logprobs[one.number :]
        one.sequence.logprobs.append(logprob)


def nothing_left(num_generated: int) -> ValueError:
    """What a sequence fails with where no token may be picked."""
    return ValueError(
        f"after {num_generated} generated tokens no token is left to pick: all logits are -inf, or one is NaN or inf; "
        f"loosen bad_words_ids, logit_bias, no_repeat_ngram_size, the logits_processors or the token_mask"
    )


class PromptLogprobs:
    """Records the log-probabilities of a prompt's tokens, which needs `wanted_from = 0`, and then gives its place to
    `strategy`."""

    is_picked = False
    rules = None
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
        tokens = sequence.tokens[first + 1 : first + 1 + num_known]
        sequence.prompt_logprobs[first + 1 : first + 1 + num_known] = token_logprobs(
            ops, logits, torch.arange(num_known), torch.tensor(tokens, dtype=torch.int64), self.num_top
        )
        if num_known == logits.shape[0]:
            return []
        sequence.strategy, sequence.wanted_from = self.strategy, None
        return self.strategy.choose(ops, logits[num_known:], span)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token whose log-probability is to be recorded."""

    row: int
    """Row of the step's logits."""
    sequence: Sequence
    number: int
    """Number of the token among the sequence's generated ones, from 0."""
    token: int
    num_top: int
    """Likeliest tokens to record beside it."""


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
        picked = self._pick(logits, spans)
        masked = pending.rows
        for row in masked:
            if row in failures or (picked[row] >= 0 and logits[row, picked[row]] == -math.inf):
                picked[row] = -1
        outcomes: list[list[int]] = [[] for _ in spans]
        chosen: list[Chosen] = []
        row = 0
        for index, span in enumerate(spans):
            num_rows = span.num_rows
            if not num_rows:
                continue
            own, strategy = picked[row : row + num_rows], span.sequence.strategy
            try:
                if min(own) < 0:
                    own = own[: self._count_left(logits, row, own, span, failures, masked)]
                if strategy.is_picked and strategy.num_logprobs is None:
                    outcomes[index] = accept_drafts(own, span)
                else:
                    outcomes[index] = self._choose(logits, row, own, span, chosen)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                span.sequence.fail(error)
            row += num_rows
        if chosen:
            for num_top in {one.num_top for one in chosen}:
                record(self.ops, logits, [one for one in chosen if one.num_top == num_top], num_top)
        return outcomes

    def _pick(self, logits: Tensor, spans: list[Span]) -> list[int]:
        """For each row the token that its strategy draws, or where nothing is to be drawn, where it is largest; -1 where
        it holds NaN or +inf, or nothing is left to draw."""
        for span in spans:
            if span.sequence.strategy.is_picked and span.sequence.strategy.rules is not None:
                break
        else:
            return self.ops.argmax(logits).tolist()
        rules: list[Rules] = []
        places: list[float] = []
        for span in spans:
            strategy, number = span.sequence.strategy, span.sequence.num_generated + span.num_certain
            for row in range(span.num_rows):
                is_drawn = strategy.is_picked and strategy.rules is not None
                rules.append(strategy.rules if is_drawn else LARGEST)
                places.append(uniform(strategy.seed, number + row) if is_drawn else 0.0)
        return self.ops.sample(logits, draws(rules, places)).tolist()

    def _choose(self, logits: Tensor, first: int, own: list[int], span: Span, chosen: list[Chosen]) -> list[int]:
        """The tokens of a span that wants more than those picked, `own`, from the row `first` on. Adds those whose
        log-probabilities are wanted to `chosen`."""
        sequence, strategy = span.sequence, span.sequence.strategy
        if not strategy.is_picked:
            return (
                strategy.choose(self.ops, logits[first : first + len(own)], span)
                if own
                else span.drafts[: span.num_certain]
            )
        number = sequence.num_generated
        if strategy.rules is None and own and logits[first, own[0]] == -math.inf:
            raise nothing_left(number)
        accepted = accept_drafts(own, span)
        chosen += [
            Chosen(first + row, sequence, number + row, token, strategy.num_logprobs)
            for row, token in enumerate(accepted)
        ]
        return accepted

    def _count_left(
        self,
        logits: Tensor,
        first: int,
        own: list[int],
        span: Span,
        failures: dict[int, BaseException],
        masked: list[int],
    ) -> int:
        """How many of a span's rows come before the first one from which nothing was picked. Raises what is wrong with
        that one, where it is none of a draft's."""
        num_left = next((row for row, token in enumerate(own) if token < 0), len(own))
        if num_left < len(own) - (len(span.drafts) - span.num_certain) and not span.num_certain:
            row = first + num_left
            if row in failures:
                raise failures[row]
            if self.ops.argmax(logits[row : row + 1])[0] < 0:
                raise not_finite(span.sequence)
            if row in masked:
                raise ValueError(
                    "no token is left to pick: the token_mask allows none, or none that the model does not rule out"
                )
            raise nothing_left(span.sequence.num_generated)
        return num_left


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


def token_logprobs(ops: Any, logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprob]:
    """The log-probability of each of `tokens [M]` under its row of `logits [R, V]`, and of the `num_top` most likely
    tokens there."""
    num_top = min(num_top, logits.shape[1])
    values, top_tokens, top_values = ops.token_logprobs(logits, rows, tokens, num_top)
    return [
        TokenLogprob(token, value, tuple(zip(*top)))
        for token, value, *top in zip(tokens.tolist(), values.tolist(), top_tokens.tolist(), top_values.tolist())
    ]


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
