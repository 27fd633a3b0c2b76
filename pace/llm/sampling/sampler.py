"""The sampler: logits in, accepted tokens out. Sequences whose strategy has a plan share one call.

Work on a whole vocabulary uses a kernel of `pace.ops`, or numpy. torch would use its own threads, and on few cores
waiting for them costs more than the work (benchmarks/RESULTS.md, "Sampling under load").
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.batch import NOT_FOUND
from pace.llm.configs import SamplingConfig
from pace.llm.constraints.mask_filler import NO_MASKS, MaskFiller, NoMasks, PendingMasks
from pace.llm.sampling.logits import Processors
from pace.llm.sequence import RowPlan, Sequence, Span, Strategy, TokenLogprob
from pace.ops.draws import RULES_DTYPE, Drawn, Draws, Edits
from pace.ops.rules import Rules


class Sampling(Strategy):
    """Applies processors, then draws by rules or takes the largest logit. Records log-probabilities if requested.
    `Sampling()` is greedy decoding.

    A draw depends only on the seed and the number of tokens generated before. Drafts are verified by drawing the token
    of each row and continuing while it equals the draft. So the tokens are the same as without drafts. If a row after
    the first fails, the result ends before it: the sequence may be finished by then. Otherwise it fails in the next
    step's first row.
    """

    takes_drafts = True

    def __init__(
        self,
        processors: Processors | None = None,
        rules: Rules | None = None,
        seed: int = 0,
        num_logprobs: int | None = None,
        is_unmasked: bool = False,
    ) -> None:
        """Takes the largest logit if `rules` is None. Records the `num_logprobs` most likely tokens in addition to the
        chosen one; None records nothing."""
        self.processors = processors = Processors([]) if processors is None else processors
        self.rules = rules
        self.seed = seed
        self.num_logprobs = num_logprobs
        self.is_unmasked = is_unmasked and num_logprobs is not None
        self.needs_every_row = bool(processors) or num_logprobs is not None
        if processors.are_sparse:
            self.plan = RowPlan(processors.edits_of if processors else None, rules, seed, num_logprobs)

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

    def _choose_one(self, ops: Any, given: Tensor, sequence: Sequence, num_ahead: int) -> int:
        """Returns the token after the sequence's tokens and `num_ahead` others."""
        num_generated = sequence.num_generated + num_ahead
        logits = torch.from_numpy(given.numpy().copy())
        self.processors.apply_(logits)
        token = self.guess(ops, logits, num_generated)
        if token < 0 or logits[token] == -math.inf:
            raise NoAllowedToken(num_generated)
        if self.num_logprobs is not None:
            row, tokens = torch.tensor([0]), torch.tensor([token])
            note(sequence, num_generated, token_logprobs(ops, given[None], row, tokens, self.num_logprobs)[0])
        return token

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        # A draft model's logits do not pass the processors, which accept each token once, and no rejected draft.
        if self.rules is None:
            return int(ops.argmax(logits[None])[0])
        return int(ops.sample(logits[None], draws([self.rules], [uniform(self.seed, num_generated)])).tokens[0])


def rules_of(config: SamplingConfig) -> Rules | None:
    """Returns the rules of `config`; None if nothing is drawn."""
    return Rules(*(getattr(config, name) for name in Rules._fields)) if config.do_sample else None


LARGEST = Rules(temperature=0.0)
"""Rules of a row without a draw."""
TAKE_LARGEST = RowPlan()
"""Plan of a row whose token from the batched call is not used, or is its largest logit."""


def draws(
    rules: list[Rules], places: list[float], edits: list[list[Edits]] | None = None, num_top: list[int] | None = None
) -> Draws:
    """Builds the arguments of the batched draw. For each row: its rules, its place in the cumulative probability, its
    edits, and its number of log-probabilities."""
    return Draws(
        rows=torch.arange(len(rules)),
        rules=np.frombuffer(b"".join(map(_record_of, rules)), RULES_DTYPE),
        uniform=torch.tensor(places, dtype=torch.float64),
        edits=edits,
        num_top=None if num_top is None else torch.tensor(num_top),
    )


@lru_cache
def _record_of(rules: Rules) -> bytes:
    """Returns the bytes of a `RULES_DTYPE`. numpy takes 20 times as long to make a record from a tuple."""
    return np.array([rules], RULES_DTYPE).tobytes()


def note(sequence: Sequence, number: int, logprob: TokenLogprob) -> None:
    """Stores the log-probability of the sequence's generated token `number`, and drops later ones."""
    del sequence.logprobs[number:]
    sequence.logprobs.append(logprob)


class NoAllowedToken(ValueError):
    """Error of a sequence for which no token can be picked."""

    def __init__(self, num_generated: int, why: str = "") -> None:
        super().__init__(
            why
            or f"after {num_generated} generated tokens no token is left to pick: all logits are -inf, or one is NaN "
            f"or inf; loosen bad_words_ids, logit_bias, no_repeat_ngram_size, the logits_processors or the token_mask"
        )
        self.num_generated = num_generated


class Collector(Strategy):
    """Passes rows of logits to a callback, as they are computed, and picks no token."""

    def __init__(self, collect: Callable[[Any, Tensor, int], Any], then: Strategy | None = None) -> None:
        """Calls `collect(ops, logits [rows, V], position of the first row)`. Rows may repeat after a dropped cache,
        with equal content. Its result, if not None, becomes that of `outcome`. `then` replaces this strategy at the row
        of the last token, which it gets."""
        self.collect = collect
        self.outcome: Future[Any] = Future()
        self._then = then
        self.is_unmasked = then is not None and then.is_unmasked

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        sequence, first = span.sequence, span.end - logits.shape[0]
        num_rows = logits.shape[0]
        if self._then is not None:
            num_rows = min(num_rows, len(sequence.tokens) - 1 - first)
        result = self.collect(ops, logits[:num_rows], first)
        if result is not None and not self.outcome.done():
            self.outcome.set_result(result)
        if num_rows == logits.shape[0]:
            return []
        sequence.strategy, sequence.wanted_from = self._then, None
        return self._then.choose(ops, logits[num_rows:], span)


def prompt_logprobs_collector(
    prompt: list[int], record: list[TokenLogprob | None], num_top: int, then: Strategy
) -> Collector:
    """Returns a strategy that records the log-probability of each token of `prompt` but the first, with the `num_top`
    most likely tokens. `record [len(prompt)]` gets them. `then` follows. The sequence needs `wanted_from = 0`."""

    def collect(ops: Any, logits: Tensor, first: int) -> None:
        places = slice(first + 1, first + 1 + logits.shape[0])
        tokens = torch.tensor(prompt[places], dtype=torch.int64)
        found = token_logprobs(ops, logits, torch.arange(len(tokens)), tokens, num_top)
        ranks = 1 + (logits > logits.gather(1, tokens[:, None])).sum(1)
        record[places] = [replace(logprob, rank=rank) for logprob, rank in zip(found, ranks.tolist())]

    return Collector(collect, then)


class Sampler:
    """Turns the logits of one step into the tokens each span continues with."""

    def __init__(self, ops: Any, vocab_size: int) -> None:
        self.ops = ops
        self._masks = MaskFiller(vocab_size)

    def prepare(self, spans: list[Span]) -> PendingMasks | NoMasks:
        """Prepares masks before the model runs. Drops drafts that the masks forbid, and starts to compute the masks of
        the rows that `sample` will get. `sample` waits for them, at the latest the end of the result's `with` block
        does."""
        return self._masks.prepare(spans)

    def sample(
        self,
        logits: Tensor,
        spans: list[Span],
        pending: PendingMasks | NoMasks = NO_MASKS,
        largest: Tensor | None = None,
    ) -> list[list[int]]:
        """Returns the tokens accepted for each span. `logits [R, V]` holds the wanted rows of the spans, in order, and
        may be changed. `largest`: that of the step (`ForwardBatch.largest`).

        A sequence fails without affecting others if its logits are not finite, its mask raises or allows nothing, or
        its strategy raises. Its `error` is then set and it gets no tokens.
        """
        if not logits.shape[0]:
            return [[] for _ in spans]
        failures = pending.wait()
        row_counts = [span.num_rows for span in spans]
        drawn = self._draw(logits, spans, row_counts, pending)
        lists = [tensor.tolist() for tensor in drawn] if drawn else [self._largest(logits, pending, largest)]
        picked = lists[0]
        for row in failures:
            picked[row] = -1
        outcomes: list[list[int]] = [[] for _ in spans]
        row = 0
        for index, (span, num_rows) in enumerate(zip(spans, row_counts)):
            if not num_rows:
                continue
            if span.sequence.error is not None:
                row += num_rows
                continue
            own, strategy = picked[row : row + num_rows], span.sequence.strategy
            try:
                if min(own) < 0:
                    own = own[: self._count_left(logits, row, own, span, failures, pending)]
                if strategy.plan is None:
                    outcomes[index] = self._choose(self._masked(logits, row, len(own), pending), span)
                else:
                    outcomes[index] = accept_drafts(own, span)
                    if strategy.plan.num_logprobs is not None:
                        self._note(lists, row, span.sequence, len(outcomes[index]))
                if strategy.is_unmasked and span.sequence.mask is not None and outcomes[index]:
                    first = row + num_rows - 1 - len(span.drafts) + span.num_certain
                    self._note_again(logits[first : row + num_rows], span.sequence, outcomes[index])
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in a Rust library is not an Exception
                span.sequence.fail(error)
            row += num_rows
        return outcomes

    def _draw(
        self, logits: Tensor, spans: list[Span], row_counts: list[int], pending: PendingMasks | NoMasks
    ) -> Drawn | None:
        """Draws a token for each row, or takes the largest logit if nothing is drawn. The token is -1 if the row holds
        NaN or +inf, or no token is left. Returns None if only the largest are wanted: `argmax` finds those without
        rules, and any masks are then applied to `logits`."""
        plans = [span.sequence.strategy.plan for span in spans]
        for plan in plans:  # any() takes four times as long, in each step
            if plan is not None and plan.needs_sampling:
                break
        else:
            if pending.bits is None:
                return None
            if None not in plans:  # else a strategy needs the unmasked logits
                self.ops.apply_mask_(logits, pending.bits, torch.tensor(pending.rows))
                return None
        rules: list[Rules] = []
        places: list[float] = []
        edits: list[list[Edits]] = []
        num_top: list[int] = []
        for span, plan, num_rows in zip(spans, plans, row_counts):
            plan = plan or TAKE_LARGEST
            number = span.sequence.num_generated + span.num_certain
            rules += [plan.rules or LARGEST] * num_rows
            places += [uniform(plan.seed, number + row) if plan.rules else 0.0 for row in range(num_rows)]
            edits += self._edits(span, plan, num_rows)
            num_top += [-1 if plan.num_logprobs is None else min(plan.num_logprobs, logits.shape[1])] * num_rows
        wanted = draws(rules, places, edits if any(edits) else None, num_top if max(num_top) >= 0 else None)
        if pending.bits is not None:
            mask_rows = torch.full((len(rules),), -1)
            mask_rows[pending.rows] = torch.arange(len(pending.rows))
            wanted = replace(wanted, masks=pending.bits, mask_rows=mask_rows)
        return self.ops.sample(logits, wanted)

    def _largest(self, logits: Tensor, pending: PendingMasks | NoMasks, largest: Tensor | None) -> list[int]:
        """Returns the index of the largest logit of each row after its mask; -1 as for `argmax`."""
        if largest is not None and pending.bits is None and NOT_FOUND not in (found := largest.tolist()):
            return found
        return self.ops.argmax(logits).tolist()

    def _edits(self, span: Span, plan: RowPlan, num_rows: int) -> list[list[Edits]]:
        """Returns the edits for each wanted row of a span. Its processors' errors fail only this sequence."""
        if num_rows and plan.edits is not None:
            try:
                return plan.edits(span)
            except Exception as error:
                span.sequence.fail(error)
        return [[] for _ in range(num_rows)]

    def _masked(self, logits: Tensor, first: int, count: int, pending: PendingMasks | NoMasks) -> Tensor:
        """Returns some rows of the logits after their masks: a copy if any has a mask."""
        rows = logits[first : first + count]
        begin, end = (bisect_left(pending.rows, row) for row in (first, first + count))
        if begin < end:
            rows = rows.clone()
            self.ops.apply_mask_(rows, pending.bits[begin:end], torch.tensor(pending.rows[begin:end]) - first)
        return rows

    def _choose(self, logits: Tensor, span: Span) -> list[int]:
        """Returns the tokens of a span whose strategy needs the logits of its rows, if any rows are left."""
        if not len(logits):
            return span.drafts[: span.num_certain]
        return span.sequence.strategy.choose(self.ops, logits, span)

    def _note(self, drawn: list[Any], first: int, sequence: Sequence, count: int) -> None:
        """Stores the log-probabilities of `count` accepted tokens, from row `first` on. `drawn` has the lists of a
        `Drawn`."""
        num_top, number = sequence.strategy.num_logprobs, sequence.num_generated
        for row, (token, logprob, top_tokens, top_logprobs) in enumerate(
            zip(*(values[first : first + count] for values in drawn))
        ):
            top = tuple(zip(top_tokens[:num_top], top_logprobs))
            note(sequence, number + row, TokenLogprob(token, logprob, top))

    def _note_again(self, logits: Tensor, sequence: Sequence, tokens: list[int]) -> None:
        """Replaces the stored log-probabilities of accepted tokens by those under `logits [rows, V]`."""
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
        """Returns how many of a span's rows come before the first one without a token. Raises that row's error unless
        it belongs to a draft."""
        num_left = next((row for row, token in enumerate(own) if token < 0), len(own))
        if num_left < len(own) - (len(span.drafts) - span.num_certain) and not span.num_certain:
            row = first + num_left
            if row in failures:
                raise failures[row]
            if not self._masked(logits, row, 1, pending).amax() < math.inf:  # catches NaN too
                raise not_finite(span.sequence)
            plan = span.sequence.strategy.plan
            if row in pending.rows and (plan is None or plan.edits is None):
                raise NoAllowedToken(
                    span.sequence.num_generated,
                    "no token is left to pick: the token_mask allows none, or none that the model does not rule out",
                )
            raise NoAllowedToken(span.sequence.num_generated)
        return num_left


def accept_drafts(chosen: list[int], span: Span) -> list[int]:
    """Returns the certain drafts of a span and the accepted tokens of `chosen`, from the rows after them. The last
    accepted token is the first that differs from its draft."""
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
    """Error of a sequence for which the model gave NaN or +inf. (-inf is a ban, which a model may use.)"""
    return ValueError(
        f"the model's logits are not finite (NaN or inf) after {len(sequence.tokens)} tokens; the weights may be "
        f"damaged, or the dtype too narrow: try dtype=float32"
    )


def token_logprobs(ops: Any, logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> list[TokenLogprob]:
    """Returns the log-probability of each of `tokens [M]` under its row of `logits [R, V]`, and the `num_top` most
    likely tokens there."""
    num_top = min(num_top, logits.shape[1])
    values, top_tokens, top_values = ops.token_logprobs(logits, rows, tokens, num_top)
    return [
        TokenLogprob(token, value, tuple(zip(*top)))
        for token, value, *top in zip(tokens.tolist(), values.tolist(), top_tokens.tolist(), top_values.tolist())
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Random numbers

_MASK = 2**64 - 1


def mix(value: int) -> int:
    """The finaliser of splitmix64: 64 bits in, 64 well-spread bits out. Source: Steele, Lea, Flood, OOPSLA 2014."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


_mix_of_seed = lru_cache(maxsize=1024)(mix)


def uniform(seed: int, index: int) -> float:
    """Returns number `index` of the seed's stream, in [0, 1). It is computed from the two only: there is no state to
    keep or rewind."""
    return (mix((_mix_of_seed((seed + 1) & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 11) * 2.0**-53


def draw(probabilities: Tensor, threshold: float) -> int:
    """Returns the first token at which the cumulative probability exceeds `threshold` (in [0, 1)) of the total. Sums in
    float64, over tokens of nonzero probability in rising order of their ids."""
    numbers = probabilities.numpy()
    candidates = np.flatnonzero(numbers > 0)
    cumulative = np.cumsum(numbers[candidates], dtype=np.float64)
    index = int(np.searchsorted(cumulative, threshold * cumulative[-1], side="right"))
    return int(candidates[min(index, len(candidates) - 1)])
