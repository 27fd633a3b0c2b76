"""Log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pace.llm.clients.session import OutcomeSink
from pace.llm.engine.driver import EngineDriver
from pace.llm.sampling.sampler import Collector
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import NeverStops


class Scores(NamedTuple):
    """Scores of the last N tokens of a row."""

    logprobs: Tensor
    """float32 `[N]`: log-probability of each token, given all tokens before it."""
    are_likeliest: Tensor
    """bool `[N]`: True if greedy decoding would have picked the token."""


def score_collector(tokens: list[int], start: int) -> Collector:
    """Returns a strategy whose outcome is the `Scores` of `tokens[start:]`, for a sequence of all tokens but the last.
    Holds the logits of one step only."""
    targets = torch.tensor(tokens[start:])
    scores = Scores(torch.empty(len(targets)), torch.empty(len(targets), dtype=torch.bool))

    def collect(ops: Any, logits: Tensor, first: int) -> Scores | None:
        begin = first - start + 1
        end = begin + logits.shape[0]
        values, likeliest, _ = ops.token_logprobs(logits, torch.arange(end - begin), targets[begin:end], 1)
        scores.logprobs[begin:end] = values
        scores.are_likeliest[begin:end] = likeliest[:, 0] == targets[begin:end]
        return scores if end == len(targets) else None

    return Collector(collect)


def score(driver: EngineDriver, rows: list[list[int]]) -> list[Tensor]:
    """Returns fp32 `[T - 1]` for each row of T tokens: entry i is `log p(token i + 1 | tokens 0 .. i)`. The first token
    has none. Raises the errors of `score_from`."""
    return [scores.logprobs for scores in score_from(driver, rows, [1] * len(rows))]


def score_from(driver: EngineDriver, rows: list[list[int]], starts: SequenceOf[int]) -> list[Scores]:
    """Returns scores of `row[start:]` for each row; the tokens before may come from the prefix cache.

    Computed in chunks, so the logits of a long row are never in memory all at once. Raises ValueError for rows longer
    than the engine holds, not counting their last token, and for a start below 1.
    """
    engine = driver.engine
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if start < 1:
            raise ValueError(f"text {index}: the start must be 1 or more, as token 0 follows nothing; got {start}")
        if len(row) - 1 > engine.max_length:
            raise ValueError(
                f"text {index} has {len(row)} tokens, but this model can score at most {engine.max_length + 1}: "
                f"{engine.explain_length_limit(len(row) - 1)}"
            )
    strategies = [score_collector(row, start) for row, start in zip(rows, starts)]
    sequences = []
    for row, start, strategy in zip(rows, starts, strategies):
        if start >= len(row):
            strategy.outcome.set_result(Scores(torch.empty(0), torch.empty(0, dtype=torch.bool)))
            continue
        sequence = Sequence(row[:-1], strategy, NeverStops(), engine.max_length)
        sequence.wanted_from, sequence.sink = start - 1, OutcomeSink()
        sequences.append(sequence)
    try:
        driver.submit(sequences)
        return [strategy.outcome.result() for strategy in strategies]
    finally:
        driver.abort(sequences)
