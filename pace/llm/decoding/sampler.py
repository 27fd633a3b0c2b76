"""Logits in, accepted tokens out. Each sequence brings a strategy; those that want the largest alone share one call.

Work on a whole vocabulary is a kernel of `pace.ops`, or numpy's: torch would share it among threads of its own, and
waiting for those costs more than the work where cores are few (benchmarks/RESULTS.md, "Sampling under load").
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.decoding.logits import Processors
from pace.llm.decoding.mask_filler import NO_MASKS, MaskFiller, NoMasks, PendingMasks
from pace.llm.sequence import Sequence, Span, TokenLogprob
from pace.ops.draws import Drawn, Draws, Edits


class DecodingStrategy(Protocol):
    """What becomes of the logits of one sequence. Made anew for each sequence."""

    is_picked: bool
    """True where `choose` would do nothing but edit a few logits, draw by `rules`, accept drafts, and record
    `num_logprobs`; the sampler then does that for all such rows at once."""
    has_edits: bool
    """True where logits are to be edited before the draw, of one that is picked; `edits` is then there, too."""
    wants_sample: bool
    """True of one that is picked, where more is wanted than the largest logit."""
    rules: Rules | None
    """Which tokens may be drawn; None where the largest is taken."""
    seed: int
    num_logprobs: int | None
    is_unmasked: bool
    """True where log-probabilities are of all tokens, also of those that the sequence's mask does not allow."""
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

    def follow(self, tokens: list[int]) -> None:
        """Hears between two steps that the sequence's tokens are the first ones of those that were."""
        ...


class Greedy:
    """The most likely token, with nothing in its way."""

    is_picked = True
    has_edits = wants_sample = False
    rules = num_logprobs = None
    seed = 0
    is_unmasked = False
    takes_drafts = True
    needs_every_row = False

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        return accept_drafts(ops.argmax(logits).tolist(), span)

    def follow(self, tokens: list[int]) -> None:
        pass

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        return int(ops.argmax(logits[None])[0])


class Rules(NamedTuple):
    """Which tokens may be drawn: the fields of `SamplingConfig` of these names."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, config: SamplingConfig) -> Rules | None:
        """None where nothing is to be drawn."""
        return cls(*(getattr(config, name) for name in cls._fields)) if config.do_sample else None


class Sampling:
    """Processors, then a draw by rules, or the largest where nothing is to be drawn; log-probabilities where asked.

    A draw depends on the seed and on how many tokens were generated before, on nothing else. Drafts are verified by
    drawing the token of each row and going on while it is the drafted one: the tokens are those that would have been
    drawn without. A row that fails after others ends there: the sequence may be done by then, and else it fails in the
    next step's first row.
    """

    takes_drafts = True

    def __init__(
        self,
        processors: Processors,
        rules: Rules | None = None,
        seed: int = 0,
        num_logprobs: int | None = None,
        is_unmasked: bool = False,
    ) -> None:
        """Without rules the largest logit is taken; `num_logprobs` most likely tokens are recorded beside the chosen
        one, None for no record."""
        self.processors = processors
        self.rules = rules
        self.seed = seed
        self.num_logprobs = num_logprobs
        self.is_unmasked = is_unmasked and num_logprobs is not None
        self.is_picked = processors.are_sparse
        self.has_edits = bool(processors) and self.is_picked
        self.wants_sample = self.is_picked and (rules is not None or self.has_edits or num_logprobs is not None)
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

    def follow(self, tokens: list[int]) -> None:
        self.processors.follow(tokens)

    def edits(self, span: Span) -> list[list[Edits]]:
        """Of each wanted row of a span: what its logits are changed by, were the drafts before it accepted."""
        tokens, drafts = span.sequence.tokens, span.drafts
        self.processors.follow(tokens)
        if not drafts:
            return [self.processors.edits()]
        rows: list[list[Edits]] = []
        for number in range(len(drafts) + 1):
            if number >= span.num_certain:
                rows.append([edits.copy() for edits in self.processors.edits()])
            if number < len(drafts):
                self.processors.accept(drafts[number])
        self.processors.follow(tokens)
        return rows

    def _choose_one(self, ops: Any, given: Tensor, sequence: Sequence, num_ahead: int) -> int:
        """The token after the sequence's and `num_ahead` others."""
        num_generated = sequence.num_generated + num_ahead
        logits = torch.from_numpy(given.numpy().copy())
        self.processors.apply_(logits)
        token = self.guess(ops, logits, num_generated)
        if token < 0 or logits[token] == -math.inf:
            raise NothingLeft(num_generated)
        if self.num_logprobs is not None:
            row, tokens = torch.tensor([0]), torch.tensor([token])
            note(sequence, num_generated, token_logprobs(ops, given[None], row, tokens, self.num_logprobs)[0])
        return token

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        """The token after `num_generated` others if `logits [V]` were the model's, after the processors; -1 where none
        is left. Of a draft model's logits, processors are not asked: they hear of each token once, and of none that does
        not come true."""
        if self.rules is None:
            return int(ops.argmax(logits[None])[0])
        return int(ops.sample(logits[None], draws([self.rules], [uniform(self.seed, num_generated)])).tokens[0])


LARGEST = Rules(temperature=0.0)
"""Rules of a row from which nothing is drawn."""


def draws(
    rules: list[Rules], places: list[float], edits: list[list[Edits]] | None = None, num_top: list[int] | None = None
) -> Draws:
    """How a token of each row is drawn: by which rules, at which place of the cumulative probability, after which edits,
    and with how many log-probabilities."""
    temperature, top_k, top_p, min_p, typical_p = zip(*rules)
    return Draws(
        rows=torch.arange(len(rules)),
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p),
        min_p=torch.tensor(min_p),
        typical_p=torch.tensor(typical_p),
        uniform=torch.tensor(places, dtype=torch.float64),
        edits=edits,
        num_top=None if num_top is None else torch.tensor(num_top),
    )


def note(sequence: Sequence, number: int, logprob: TokenLogprob) -> None:
    """Keeps the log-probability of the sequence's generated token of that number."""
    del sequence.logprobs[number:]
    sequence.logprobs.append(logprob)


class NothingLeft(ValueError):
    """What a sequence fails with where no token may be picked."""

    def __init__(self, num_generated: int, why: str = "") -> None:
        super().__init__(
            why
            or f"after {num_generated} generated tokens no token is left to pick: all logits are -inf, or one is NaN or "
            f"inf; loosen bad_words_ids, logit_bias, no_repeat_ngram_size, the logits_processors or the token_mask"
        )
        self.num_generated = num_generated


class PromptLogprobs:
    """Records the log-probabilities of a prompt's tokens, which needs `wanted_from = 0`, and then gives its place to
    `strategy`."""

    is_picked = has_edits = wants_sample = False
    rules = None
    takes_drafts = False

    def __init__(self, strategy: DecodingStrategy, num_top: int) -> None:
        """`num_top` most likely tokens are recorded beside each token of the prompt."""
        self.strategy = strategy
        self.num_top = num_top
        self.is_unmasked = strategy.is_unmasked

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        sequence = span.sequence
        first = span.end - logits.shape[0]
        num_known = min(
            logits.shape[0], len(sequence.tokens) - 1 - first
        )  # rows that a token of the prompt comes after
        tokens = sequence.tokens[first + 1 : first + 1 + num_known]
        known = torch.tensor(tokens, dtype=torch.int64)
        found = token_logprobs(ops, logits, torch.arange(num_known), known, self.num_top)
        ranks = _ranks(logits[:num_known], known)
        sequence.prompt_logprobs[first + 1 : first + 1 + num_known] = [
            replace(logprob, rank=rank) for logprob, rank in zip(found, ranks)
        ]
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
        the other, and may be changed.

        A sequence whose logits are not finite, whose mask raises or allows nothing, or whose strategy raises, fails
        alone: its `error` is set and it gets no tokens.
        """
        if not logits.shape[0]:
            return [[] for _ in spans]
        failures = pending.wait()
        drawn = self._draw(logits, spans, pending)
        picked = (self.ops.argmax(logits) if drawn is None else drawn.tokens).tolist()
        for row in failures:
            picked[row] = -1
        outcomes: list[list[int]] = [[] for _ in spans]
        row = 0
        for index, span in enumerate(spans):
            num_rows = span.num_rows
            if not num_rows:
                continue
            if span.sequence.error is not None:
                row += num_rows
                continue
            own, strategy = picked[row : row + num_rows], span.sequence.strategy
            try:
                if min(own) < 0:
                    own = own[: self._count_left(logits, row, own, span, failures, pending)]
                if not strategy.is_picked:
                    outcomes[index] = self._choose(self._masked(logits, row, len(own), pending), span)
                else:
                    outcomes[index] = accept_drafts(own, span)
                    if strategy.num_logprobs is not None:
                        self._note(drawn, row, span.sequence, len(outcomes[index]))
                if strategy.is_unmasked and span.sequence.mask is not None and outcomes[index]:
                    first = row + num_rows - 1 - len(span.drafts) + span.num_certain
                    self._note_again(logits[first : row + num_rows], span.sequence, outcomes[index])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of a library in Rust is no Exception
                span.sequence.fail(error)
            row += num_rows
        return outcomes

    def _draw(self, logits: Tensor, spans: list[Span], pending: PendingMasks | NoMasks) -> Drawn | None:
        """For each row the token that its strategy draws, or where nothing is to be drawn, where it is largest; -1 where
        it holds NaN or +inf, or nothing is left to draw. None where only the largest are wanted, of the rows as
        their masks leave them by then: `argmax` finds those without rules."""
        if not any(span.sequence.strategy.wants_sample for span in spans):
            if pending.bits is None:
                return None
            if all(span.sequence.strategy.is_picked for span in spans):  # else somebody looks at the logits
                self.ops.apply_mask_(logits, pending.bits, torch.tensor(pending.rows))
                return None
        rules: list[Rules] = []
        places: list[float] = []
        edits: list[list[Edits]] = []
        num_top: list[int] = []
        for span in spans:
            strategy, num_rows = span.sequence.strategy, span.num_rows
            number = span.sequence.num_generated + span.num_certain
            is_drawn = strategy.is_picked and strategy.rules is not None
            rules += [strategy.rules if is_drawn else LARGEST] * num_rows
            places += [uniform(strategy.seed, number + row) if is_drawn else 0.0 for row in range(num_rows)]
            edits += self._edits(span, strategy)
            wants_logprobs = strategy.is_picked and strategy.num_logprobs is not None
            num_top += [min(strategy.num_logprobs, logits.shape[1]) if wants_logprobs else -1] * num_rows
        wanted = draws(rules, places, edits if any(edits) else None, num_top if max(num_top) >= 0 else None)
        if pending.bits is not None:
            mask_rows = torch.full((len(rules),), -1)
            mask_rows[pending.rows] = torch.arange(len(pending.rows))
            wanted = replace(wanted, masks=pending.bits, mask_rows=mask_rows)
        return self.ops.sample(logits, wanted)

    def _edits(self, span: Span, strategy: DecodingStrategy) -> list[list[Edits]]:
        """Of each wanted row of a span, which fails alone where its processors do."""
        if span.num_rows and strategy.is_picked and strategy.has_edits:
            try:
                return strategy.edits(span)
            except Exception as error:
                span.sequence.fail(error)
        return [[] for _ in range(span.num_rows)]

    def _masked(self, logits: Tensor, first: int, count: int, pending: PendingMasks | NoMasks) -> Tensor:
        """Some rows of the logits as their masks leave them: a copy, where any has a mask."""
        rows = logits[first : first + count]
        begin, end = (bisect_left(pending.rows, row) for row in (first, first + count))
        if begin < end:
            rows = rows.clone()
            self.ops.apply_mask_(rows, pending.bits[begin:end], torch.tensor(pending.rows[begin:end]) - first)
        return rows

    def _choose(self, logits: Tensor, span: Span) -> list[int]:
        """The tokens of a span whose strategy looks at the logits of its rows, as far as any are left."""
        if not len(logits):
            return span.drafts[: span.num_certain]
        return span.sequence.strategy.choose(self.ops, logits, span)

    def _note(self, drawn: Drawn, first: int, sequence: Sequence, count: int) -> None:
        """Keeps the log-probabilities of `count` accepted tokens, those of the rows from the first on."""
        num_top, number = sequence.strategy.num_logprobs, sequence.num_generated
        for row in range(first, first + count):
            top = zip(drawn.top_tokens[row, :num_top].tolist(), drawn.top_logprobs[row, :num_top].tolist())
            logprob = TokenLogprob(int(drawn.tokens[row]), float(drawn.logprobs[row]), tuple(top))
            note(sequence, number + row - first, logprob)

    def _note_again(self, logits: Tensor, sequence: Sequence, tokens: list[int]) -> None:
        """Keeps the log-probabilities of accepted tokens under `logits [rows, V]`, in place of those that were noted."""
        rows, chosen = torch.arange(len(tokens)), torch.tensor(tokens)
        found = token_logprobs(self.ops, logits, rows, chosen, sequence.strategy.num_logprobs)
        for number, logprob in enumerate(found, sequence.num_generated):
            note(sequence, number, logprob)

    def _count_left(
        self,
        logits: Tensor,
        first: int,
        own: list[int],
        span: Span,
        failures: dict[int, BaseException],
        pending: PendingMasks | NoMasks,
    ) -> int:
        """How many of a span's rows come before the first one from which nothing was picked. Raises what is wrong with
        that one, where it is none of a draft's."""
        num_left = next((row for row, token in enumerate(own) if token < 0), len(own))
        if num_left < len(own) - (len(span.drafts) - span.num_certain) and not span.num_certain:
            row = first + num_left
            if row in failures:
                raise failures[row]
            if not self._masked(logits, row, 1, pending).amax() < math.inf:  # NaN is not, either
                raise not_finite(span.sequence)
            if row in pending.rows and not (span.sequence.strategy.is_picked and span.sequence.strategy.has_edits):
                raise NothingLeft(
                    span.sequence.num_generated,
                    "no token is left to pick: the token_mask allows none, or none that the model does not rule out",
                )
            raise NothingLeft(span.sequence.num_generated)
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


def _ranks(logits: Tensor, tokens: Tensor) -> list[int]:
    """The rank of each of `tokens [M]` in its row of `logits [M, V]`: 1 + the number of tokens that are likelier."""
    return (1 + (logits > logits.gather(1, tokens[:, None])).sum(1)).tolist()


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
