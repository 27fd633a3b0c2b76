"""Beam search: follows several continuations of a prompt at once and keeps the likeliest.

The results are those of transformers (`GenerationMixin._beam_search`, 5.24) for each prompt by itself. One round, with
K beams and E end tokens:

    logits      log-probabilities of the next token of each beam, after the processors (not renormalised).
    candidates  the max(2, 1 + E) K likeliest continuations of all beams together. With do_sample, that number is drawn
                without replacement. The likeliest are first.
    finished    those of the first K candidates that stop join those of earlier rounds; the K best stay. The score is
                log-probability / generated tokens ** length_penalty.
    running     the K likeliest candidates that do not stop are the next beams.

The search is over when nothing runs. It is also over when K have finished and `early_stopping` is True. With False, it
is over when K have finished and the likeliest beam, at its length now, is no better than the worst of them. "never"
with a positive length_penalty scores that beam at the maximum length. If bans leave fewer than K continuations, the
search continues with those; transformers adds copies of log-probability -1e9.

A beam is a sequence of the engine that is parked after every token. Beams with the same parent share its blocks in the
cache: a fork counts references, and only a shared block that is written is copied.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from pace.llm.clients.batch import Batch
from pace.llm.clients.streamer import Streamer
from pace.llm.configs import SamplingConfig
from pace.llm.constraints.masks import SequenceMask, TokenMask
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.sampling.filters import Filter, largest, log_softmax
from pace.llm.sampling.logits import Processors
from pace.llm.sampling.sampler import draw, prompt_logprobs_collector, uniform
from pace.llm.sequence import Sequence, Span, Strategy, TokenLogprob
from pace.llm.text.stopping_criteria import NeverStops, StoppingCriteria


def candidates_per_beam(num_end_tokens: int) -> int:
    """Returns the number of candidates per beam: enough to continue even if every end token is among them."""
    return max(2, 1 + num_end_tokens)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates for the next token of one beam."""

    num_tokens: int
    """Length of the beam, prompt included."""
    tokens: np.ndarray
    """int64 `[C]`."""
    log_probabilities: np.ndarray
    """fp32 `[C]`, after processors and filters."""
    own: np.ndarray
    """fp32 `[C]`, the model's own; empty unless log-probabilities are requested."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens by the model's own probabilities, as in `TokenLogprob`."""


class BeamStrategy(Strategy):
    """Keeps the candidates of a beam and generates no token: the search decides."""

    def __init__(
        self, processors: Processors, filter_: Filter | None, num_kept: int | None, num_logprobs: int | None
    ) -> None:
        """Keeps the `num_kept` likeliest tokens, likeliest first. None keeps all, in the order of their ids, to draw
        from."""
        self.processors = processors
        self.filter_ = filter_
        self.num_kept = num_kept
        self.num_logprobs = num_logprobs
        self.candidates: Candidates | None = None

    def fork(self) -> BeamStrategy:
        """Returns the strategy of a second beam with the same tokens."""
        return BeamStrategy(self.processors.fork(), self.filter_, self.num_kept, self.num_logprobs)

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        tokens = span.sequence.tokens
        numbers = log_softmax(logits[0])
        log_probabilities = torch.from_numpy(numbers)
        own = None if self.num_logprobs is None else numbers.copy()
        self.processors.follow(tokens)
        self.processors.apply_(log_probabilities)
        if not numbers.max() < np.inf:  # catches NaN too
            raise ValueError(
                f"after {len(tokens)} tokens the logits_processors gave NaN or inf; they must return finite numbers, "
                f"or -inf to ban a token"
            )
        if self.filter_ is not None:
            self.filter_(log_probabilities)
        kept = np.flatnonzero(numbers > -np.inf) if self.num_kept is None else largest(numbers, self.num_kept)
        if own is None:
            self.candidates = Candidates(len(tokens), kept, numbers[kept], own=numbers[:0], top=())
        else:
            best = largest(own, self.num_logprobs)
            self.candidates = Candidates(
                len(tokens), kept, numbers[kept], own[kept], tuple(zip(best.tolist(), own[best].tolist()))
            )
        return []


@dataclass(slots=True)
class Hypothesis:
    """A sequence of the search: a running beam, or one that has ended. Stopping criteria can use it like a
    `Sequence`."""

    tokens: list[int]
    num_prompt_tokens: int
    log_probability: float
    """Sum over the generated tokens, after processors and filters."""
    stopping: StoppingCriteria
    mask: SequenceMask | None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    parent: int = 0
    """Rank of the beam that it continues."""
    finish_reason: str | None = None
    steps: ClassVar[None] = None
    """A search has no step callback."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Round:
    """Result of a round: the running beams, likeliest first, and the finished ones, best first."""

    running: list[Hypothesis]
    finished: list[Hypothesis]


@dataclass(frozen=True, slots=True)
class State:
    """State of a search."""

    beams: list[Sequence]
    """The sequences of `now.running`, one for each."""
    now: Round
    next: Round | None = None
    """The next round once it is decided; it may have been applied in part."""


class BeamSearch:
    """Search for one prompt, using `num_beams` sequences that stay in the engine until it is over.

    `rows` are the results: sequences that are never computed. They get their tokens and `finish_reason`, or an `error`,
    at the end of the search. All methods must be called on the thread that owns the engine.
    """

    def __init__(
        self,
        prompt: list[int],
        max_length: int,
        config: SamplingConfig,
        stopping: StoppingCriteria,
        make_strategy: Callable[[], BeamStrategy],
        seed: int,
        mask: TokenMask | None = None,
    ) -> None:
        """`max_length` counts prompt and generated tokens. `make_strategy` is called once for each beam, and each beam
        has a fork of `mask`."""
        self.prompt = prompt
        self.max_length = max_length
        self.config = config
        self.stopping = stopping
        self.make_strategy = make_strategy
        self.seed = seed
        self.mask = mask
        self.num_candidates = candidates_per_beam(len(stopping.end_tokens)) * config.num_beams
        self.rows = [Sequence(prompt, None, stopping, max_length) for _ in range(config.num_return_sequences)]
        prompt_logprobs = None if config.prompt_logprobs is None else [None] * len(prompt)
        for row in self.rows:
            row.score, row.prompt_logprobs = -np.inf, prompt_logprobs
        self._sequences: list[Sequence] = []
        self._state = State([], Round([], []))

    @property
    def is_over(self) -> bool:
        return self.rows[-1].is_finished

    # -- calls of the owner --------------------------------------------------------------------------------------------

    def start(self, engine: Engine) -> None:
        """Puts the prompt into the engine. The search continues until it is over or cancelled. Does nothing if it was
        cancelled before."""
        if self.is_over:
            return
        self._engine = engine
        self._sequences = [
            Sequence(self.prompt, self.make_strategy(), NeverStops(), self.max_length)
            for _ in range(self.config.num_beams)
        ]
        for sequence in self._sequences:
            sequence.media, sequence.adapter = self.rows[0].media, self.rows[0].adapter
        mask = None if self.mask is None else SequenceMask(self.mask)
        self._state = State(
            self._sequences[:1], Round([Hypothesis(self.prompt, len(self.prompt), 0.0, self.stopping, mask)], [])
        )
        first = self._sequences[0]
        first.mask = self._state.now.running[0].mask
        if self.config.prompt_logprobs is not None:
            record, num_top = self.rows[0].prompt_logprobs, self.config.prompt_logprobs
            first.strategy = prompt_logprobs_collector(self.prompt, record, num_top, first.strategy)
            first.wanted_from = 0
        for sequence in self._sequences[1:]:
            engine.scheduler.park(sequence)
        engine.scheduler.add(first)
        self._sort_key = first.sort_key
        engine.between_steps.append(self.advance)

    def cancel(self) -> None:
        """Ends the search with the results so far, finished sequences first, and frees its blocks. Harmless if it is
        over, or was never started."""
        if not self.is_over:
            now = self._state.now
            self._finish(now.finished + sorted(now.running, key=self._score, reverse=True), "cancelled")
            self._leave()

    # -- calls of the engine, between two steps ------------------------------------------------------------------------

    def advance(self) -> None:
        """Decides the next round once the candidates of all beams are known, and continues with its beams. An error
        ends this search. While beams are moved it also fails the step, since the cache contents are then unreliable.
        """
        if not self.is_over:
            try:
                self._choose()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic in a Rust library is not an Exception
                self._fail_rows(error)
        try:
            self._move()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if not self.is_over:
                self._fail_rows(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Ends the search with an error."""
        self._fail_rows(error)
        self._leave()

    def _fail_rows(self, error: BaseException) -> None:
        for row in self.rows:
            row.fail(error)

    def _choose(self) -> None:
        """Decides the next round, or the results. Moves nothing."""
        for beam in self._state.beams:
            if beam.error is not None:
                raise beam.error
        if self._state.next is None and all(map(self._is_ranked, self._state.beams)):
            self._note_times(self._state.beams[0])
            self._state = State(self._state.beams, self._state.now, self._decide())
        if self._state.next is not None and self._is_decided(self._state.next):
            self._finish(self._state.next.finished)

    def _move(self) -> None:
        """Applies the decision. Does nothing for a search that has left the engine, possibly because of another
        move."""
        if self.is_over:
            if self._sequences:
                self._leave()
            return
        if self._state.next is not None:
            self._go_on(self._state.next)
        for beam in self._state.beams:
            if not self._is_ranked(beam):
                self._engine.scheduler.resume(beam, self._sort_key)

    def _note_times(self, beam: Sequence) -> None:
        """Records the time of the rows' first token when the prompt has been computed."""
        for row in self.rows:
            if row.stats.first_token is None:
                row.stats.admitted, row.stats.num_reused = beam.stats.admitted, beam.stats.num_reused
                row.stats.first_token = time.perf_counter()

    def _is_ranked(self, beam: Sequence) -> bool:
        if beam not in self._engine.scheduler.parked:
            return False
        candidates = beam.strategy.candidates
        return candidates is not None and candidates.num_tokens == len(beam.tokens)

    # -- one round -----------------------------------------------------------------------------------------------------

    def _decide(self) -> Round:
        """Returns the next round. Changes nothing."""
        num_beams, now = self.config.num_beams, self._state.now
        candidates = [beam.strategy.candidates for beam in self._state.beams]
        running: list[Hypothesis] = []
        finished = list(now.finished)
        for rank, (parent, index) in enumerate(self._best(now.running, candidates)):
            hypothesis = self._extend(now.running[parent], candidates[parent], parent, index)
            if hypothesis.finish_reason is None:
                running.append(hypothesis)
            elif rank < num_beams:
                finished.append(hypothesis)
        running.sort(key=lambda hypothesis: -hypothesis.log_probability)
        finished.sort(key=lambda hypothesis: -self._score(hypothesis))  # stable: among equals the earlier one is first
        return Round(running[:num_beams], finished[:num_beams])

    def _best(self, running: list[Hypothesis], candidates: list[Candidates]) -> list[tuple[int, int]]:
        """Returns (rank of the beam, index of the candidate) of the likeliest or drawn ones, likeliest first."""
        sums = np.concatenate(
            [
                beam.log_probability + those.log_probabilities.astype(np.float64)
                for beam, those in zip(running, candidates)
            ]
        )
        if self.config.do_sample:
            drawn = self._draw(sums, running[0].num_generated)
            picked = sorted(drawn, key=lambda index: -sums[index])
        else:
            picked = np.argsort(-sums, kind="stable")[: self.num_candidates].tolist()
        ends = np.cumsum([len(those.tokens) for those in candidates])
        parents = np.searchsorted(ends, picked, side="right").tolist()
        return [
            (parent, index - int(ends[parent]) + len(candidates[parent].tokens))
            for parent, index in zip(parents, picked)
        ]

    def _draw(self, sums: np.ndarray, num_generated: int) -> list[int]:
        """Returns `num_candidates` different indices, each drawn by exp(sums) from those left; fewer if no more are
        possible."""
        if not len(sums):
            return []
        weights = np.exp(sums - sums.max())
        picked: list[int] = []
        first = num_generated * self.num_candidates
        for number in range(first, first + self.num_candidates):
            if not weights.any():
                break
            picked.append(draw(torch.from_numpy(weights), uniform(self.seed, number)))
            weights[picked[-1]] = 0.0
        return picked

    def _extend(self, beam: Hypothesis, candidates: Candidates, parent: int, index: int) -> Hypothesis:
        token = int(candidates.tokens[index])
        log_probability = beam.log_probability + float(candidates.log_probabilities[index])
        logprobs = (
            [*beam.logprobs, TokenLogprob(token, float(candidates.own[index]), candidates.top)]
            if len(candidates.own)
            else []
        )
        hypothesis = Hypothesis(
            [*beam.tokens, token],
            len(self.prompt),
            log_probability,
            beam.stopping.fork(),
            beam.mask and beam.mask.fork(),
            logprobs,
            parent,
        )
        hypothesis.finish_reason = hypothesis.stopping.stop_now(hypothesis)
        return hypothesis

    def _score(self, hypothesis: Hypothesis) -> float:
        return hypothesis.log_probability / max(1, hypothesis.num_generated) ** self.config.length_penalty

    def _is_decided(self, round: Round) -> bool:
        """True if no running beam can change the finished ones, or none runs."""
        config = self.config
        if not round.running:
            return True
        if len(round.finished) < config.num_beams:
            return False
        if config.early_stopping is True:
            return True
        is_patient = config.early_stopping == "never" and config.length_penalty > 0
        length = self.max_length - len(self.prompt) if is_patient else round.running[0].num_generated
        return round.running[0].log_probability / length**config.length_penalty <= self._score(round.finished[-1])

    def _go_on(self, next: Round) -> None:
        """Turns the sequences into the beams of the next round. If interrupted, it may be repeated from `State.next`
        with an empty cache."""
        cache = self._engine.cache
        placed = self._assign(next.running)
        kept = [sequence for sequence, parent in placed if sequence is parent]
        for sequence in self._sequences:
            if sequence not in kept:
                cache.free(sequence)
        for sequence, parent in placed:
            if sequence is not parent:
                cache.fork(parent, sequence, parent.num_computed)
                sequence.recomputed_length = parent.recomputed_length
                sequence.strategy = parent.strategy.fork()
        for (sequence, _), hypothesis in zip(placed, next.running):
            sequence.tokens, sequence.mask = hypothesis.tokens, hypothesis.mask
            sequence.stats.first_token = self.rows[0].stats.first_token
        self._state = State([sequence for sequence, _ in placed], next)

    def _assign(self, running: list[Hypothesis]) -> list[tuple[Sequence, Sequence]]:
        """Returns, for each hypothesis, its sequence and its parent's. A parent's first child keeps the parent's
        sequence, so that its blocks stay in place. Others get a free sequence."""
        beams = self._state.beams
        parents = [beams[hypothesis.parent] for hypothesis in running]
        free = [sequence for sequence in self._sequences if sequence not in parents]
        is_first = [parent not in parents[:rank] for rank, parent in enumerate(parents)]
        return [(parent if first else free.pop(), parent) for parent, first in zip(parents, is_first)]

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, hypotheses: list[Hypothesis], reason: str | None = None) -> None:
        """Assigns the results to the rows, best first. `reason` is given if the search was cut short: rows without a
        result are then the prompt only. Otherwise raises ValueError for too few results."""
        if reason is None and len(hypotheses) < len(self.rows):
            raise ValueError(
                f"beam search found {len(hypotheses)} texts, but num_return_sequences={len(self.rows)}; no more are "
                f"possible. Loosen bad_words_ids, logit_bias, no_repeat_ngram_size or the logits_processors, or lower "
                f"num_return_sequences"
            )
        now = time.perf_counter()
        self.rows[0].stats.num_preemptions = sum(sequence.stats.num_preemptions for sequence in self._sequences)
        for row, hypothesis in zip_longest(self.rows, hypotheses[: len(self.rows)]):
            if hypothesis is not None:
                row.tokens, row.stopping, row.logprobs = hypothesis.tokens, hypothesis.stopping, hypothesis.logprobs
                row.score = self._score(hypothesis)
            row.stats.finished = now
            row.finish_reason = reason or hypothesis.finish_reason

    def _leave(self) -> None:
        """Removes everything from the engine, drops the state, and notifies the sinks of the rows' end."""
        for sequence in self._sequences:
            self._engine.scheduler.remove(sequence)
        if self._sequences and self.advance in self._engine.between_steps:
            self._engine.between_steps.remove(self.advance)
        self._state = State([], Round([], []))
        self._sequences = []
        for row in self.rows:
            row.sink.end(row, row.finish_reason, row.error)


def check_length_penalty(length_penalty: float, most: int) -> None:
    """Raises ValueError if scores of sequences of up to `most` tokens would be infinite or zero."""
    try:
        is_fine = 0.0 < float(most) ** length_penalty < np.inf
    except OverflowError:
        is_fine = False
    if not is_fine:
        raise ValueError(
            f"length_penalty={length_penalty:g} is out of range: {most} tokens to this power is 0 or infinite; use a "
            f"number closer to 0"
        )


class BeamBatch(Batch):
    """The rows of one call with beam search. Runs several searches at the same time if all their beams fit into one
    step, and always at least one."""

    def __init__(
        self, driver: EngineDriver, searches: Iterator[BeamSearch], streamer: Streamer, cancel: threading.Event | None
    ) -> None:
        self._searches: list[BeamSearch] = []
        super().__init__(driver, self._rows_of(searches), streamer, cancel)

    def _rows_of(self, searches: Iterator[BeamSearch]) -> Iterator[list[Sequence]]:
        for search in searches:
            self._searches.append(search)
            yield search.rows

    def _has_room(self) -> bool:
        self._searches = [search for search in self._searches if not search.is_over]
        num_beams = sum(search.config.num_beams for search in self._searches)
        most = self.driver.engine.scheduler.max_sequences_per_step
        return not num_beams or num_beams + self._searches[0].config.num_beams <= most

    def _submit(self, group: list[Sequence]) -> None:
        search = self._searches[-1]
        self.driver.post(search.start, search.fail)

    def _end_rows(self, engine: Engine) -> None:
        for search in list(self._searches):
            search.cancel()
