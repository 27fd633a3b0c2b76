"""`CausalEmbedder`: the `Embedder` of a causal model, which runs in its engine next to sequences that generate.

Chunks, the prefix cache and preemption are the engine's. A step without logits does not compute the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE
from pace.llm.encoding.embedder import LOGITS, Pooling, TextTokens, What, check_texts, wait_for
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.sequence import NULL_SINK, RowStrategy, Span, Strategy, TokenLogprob
from pace.llm.sequence import Sequence as EngineSequence
from pace.llm.text.stopping_criteria import NeverStops
from pace.ops.checks import check_pooling
from pace.ops.protocol import Ops

LAST: Pooling = ("lasttoken",)

Answers = tuple[int, int | None]
"""Ids of two tokens: the score of a text is the logit of the first less that of the second, if there is one."""


class CausalEmbedder:
    """Computes rows of the final norm, pooled, and logits of a classifier or of two answers."""

    num_types = 0
    instructions: Mapping[str, str] = {}

    def __init__(self, driver: EngineDriver, pad_token_id: int | None = None):
        """`pad_token_id`: the config's. A classifier reads the row of the last token that is another one."""
        runner = driver.engine.model
        self._driver = driver
        self._ops = driver.engine.ops
        self._classifier = runner.model.classifier
        self._pad_token_id = pad_token_id
        self.hidden_size: int = runner.row_size
        self.max_length = driver.engine.max_length
        self.vocab_size: int = runner.vocab_size
        self.num_labels = self._classifier.n if self._classifier else 0

    def submit(self, texts: Sequence[TextTokens], what: What) -> Future[Tensor]:
        texts = tuple(texts)
        if what == LOGITS:
            classifier = self._classifier
            if classifier is None:
                raise ValueError(
                    "this model has no classifier, so it has no logits of labels; load a checkpoint of a "
                    "*ForSequenceClassification"
                )
            check_texts(self, texts)
            rows = [RowCollector(self._ops, LAST) for _ in texts]
            ended = [replace(text, tokens=self._without_padding(text.tokens)) for text in texts]
            return self._start(ended, rows, self.num_labels, lambda x: classifier(self._ops, x), shares=True)
        if isinstance(what, str) or not what:
            raise ValueError(f"pooling must be a tuple of one or more names; got {what!r}")
        pooling = tuple(check_pooling(name) for name in what)
        check_texts(self, texts)
        return self._start(texts, [RowCollector(self._ops, pooling) for _ in texts], self.hidden_size * len(pooling))

    def submit_answers(self, texts: Sequence[TextTokens], answers: Answers) -> Future[Tensor]:
        """Queues prompts. The future gets float32 `[N, 1]`, the scores of two answers after each. Tokens that all texts
        begin with are computed once. Raises as `submit`, and for ids that the model does not have."""
        texts = tuple(texts)
        check_texts(self, texts)
        if any(answer is not None and not 0 <= answer < self.vocab_size for answer in answers):
            raise ValueError(f"answers must be ids from 0 to {self.vocab_size - 1}; got {answers}")
        return self._start(texts, [AnswerCollector(answers) for _ in texts], 1, shares=True)

    def rows(self, texts: Sequence[TextTokens], pooling: Pooling) -> Tensor:
        return wait_for(self.submit(texts, pooling))

    def logits(self, texts: Sequence[TextTokens]) -> Tensor:
        return wait_for(self.submit(texts, LOGITS))

    @property
    def driver(self) -> EngineDriver:
        return self._driver

    def close(self) -> None:
        self._driver.close()

    def _without_padding(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens up to the last one that is no padding; the first one if all are."""
        end = len(tokens)
        while end > 1 and tokens[end - 1] == self._pad_token_id:
            end -= 1
        return tokens[:end]

    def _start(
        self,
        texts: Sequence[TextTokens],
        strategies: Sequence[TextStrategy],
        width: int,
        finish: Callable[[Tensor], Tensor] = lambda rows: rows,
        shares: bool = False,
    ) -> Future[Tensor]:
        """Starts a sequence for each text. The future gets `finish` of the rows of all. `width`: columns of a
        result. With `shares`, what all texts begin with is computed first, by a sequence of its own."""
        engine = self._driver.engine
        sequences = [_sequence(text, strategy, engine) for text, strategy in zip(texts, strategies)]
        job = _Job(self._driver, sequences, strategies, finish)
        if not sequences:
            job.future.set_result(torch.empty(0, width))
            return job.future
        for sequence in sequences:
            sequence.sink = job
        leaders = self._leaders(texts, sequences, engine) if shares else []
        job.start(leaders)
        return job.future

    def _leaders(
        self, texts: Sequence[TextTokens], sequences: Sequence[EngineSequence], engine: Engine
    ) -> list[EngineSequence]:
        """Returns the sequence that computes the common beginning, if it fills a block. The others wait for it, except
        those whose length gives their tokens other angles."""
        num_shared = common_prefix([text.tokens for text in texts])
        if len(texts) < 2 or num_shared < BLOCK_SIZE:
            return []
        regime = engine.model.rope_regime
        sharers = [sequence for sequence in sequences if regime(len(sequence.tokens)) == regime(num_shared + 1)]
        if len(sharers) < 2:
            return []
        beginning = replace(texts[0], tokens=texts[0].tokens[: num_shared + 1])
        leader = _sequence(beginning, RowCollector(self._ops, LAST), engine)
        leader.share_prompt(sharers)
        return [leader]


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """Number of tokens that all rows begin with, and that leave at least one of each."""
    first, last = min(rows), max(rows)
    most = min(map(len, rows)) - 1
    return next((index for index in range(most) if first[index] != last[index]), most)


def _sequence(text: TextTokens, strategy: TextStrategy, engine: Engine) -> EngineSequence:
    sequence = EngineSequence(list(text.tokens), strategy, NeverStops(), engine.max_length)
    sequence.cache_salt = text.cache_salt
    sequence.takes_rows, sequence.wanted_from = strategy.takes_rows, strategy.wanted_from
    return sequence


class TextStrategy(Strategy):
    """Ends a sequence once its whole text is computed, and keeps the result."""

    takes_rows = False
    wanted_from: int | None = None
    result: Tensor
    """float32 `[W]`, once the sequence has ended."""


class RowCollector(TextStrategy, RowStrategy):
    """Pools rows of the final norm."""

    takes_rows = True

    def __init__(self, ops: Ops, pooling: Pooling):
        self._ops = ops
        self._pooling = pooling
        self._rows: Tensor | None = None
        """All rows of the text, if more than the last one is pooled."""
        if pooling != LAST:
            self.wanted_from = 0

    def take(self, rows: Tensor, span: Span) -> None:
        num_tokens = len(span.sequence.tokens)
        if self.wanted_from is not None:
            if self._rows is None:
                self._rows = torch.empty(num_tokens, rows.shape[1])
            self._rows[span.end - rows.shape[0] : span.end] = rows
        if span.end < num_tokens:
            return
        if self._rows is None:
            self.result = rows[-1].clone()
        else:
            edges = torch.tensor([0, num_tokens], dtype=torch.int32)
            self.result = torch.cat([self._ops.pool(self._rows, edges, name)[0] for name in self._pooling])
            self._rows = None
        span.sequence.finish_reason = "stop"


class AnswerCollector(TextStrategy):
    """Compares the logits of two answers."""

    def __init__(self, answers: Answers):
        self._answers = answers

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        first, second = self._answers
        row = logits[-1]
        self.result = row[first : first + 1].clone() if second is None else row[first : first + 1] - row[second]
        span.sequence.finish_reason = "stop"
        return []


class _Job:
    """The texts of one call, as the sink of their sequences."""

    def __init__(
        self,
        driver: EngineDriver,
        sequences: Sequence[EngineSequence],
        strategies: Sequence[TextStrategy],
        finish: Callable[[Tensor], Tensor],
    ):
        self.future: Future[Tensor] = Future()
        self._driver = driver
        self._sequences = list(sequences)
        self._strategies = strategies
        self._finish = finish
        self._num_left = len(self._sequences)

    def start(self, leaders: Sequence[EngineSequence]) -> None:
        """Submits the sequences after `leaders`, which have no result. Raises the errors of `EngineDriver.submit`."""
        for leader in leaders:
            leader.sink = NULL_SINK
        self._sequences[:0] = leaders
        self._driver.submit(self._sequences)
        self.future.add_done_callback(self._stop)

    def _stop(self, future: Future[Tensor]) -> None:
        """Removes what is left of a job that was cancelled or has failed."""
        if future.cancelled() or future.exception() is not None:
            self._driver.abort(self._sequences)

    def token(self, sequence: EngineSequence, token: int, logprob: TokenLogprob | None) -> None:
        pass

    def rollback(self, sequence: EngineSequence, num_tokens: int) -> None:
        pass

    def end(self, sequence: EngineSequence, reason: str, error: BaseException | None) -> None:
        self._num_left -= 1
        try:
            if error is not None:
                self.future.set_exception(error)
            elif reason == "cancelled":
                self.future.cancel()
            elif not self._num_left and not self.future.done():
                self.future.set_result(self._finish(torch.stack([each.result for each in self._strategies])))
        except InvalidStateError:  # cancelled meanwhile, or failed before
            pass
        except Exception as failure:
            self.future.set_exception(failure)
