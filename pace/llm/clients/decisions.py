"""The logits of labels at given places of prompts with a common beginning, which is computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from os.path import commonprefix
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE
from pace.llm.clients.session import OutcomeSink
from pace.llm.engine.driver import EngineDriver
from pace.llm.sampling.sampler import Collector
from pace.llm.sequence import AdapterKey, Sequence
from pace.llm.text.stopping_criteria import NeverStops


class LabelPlaces(NamedTuple):
    """A prompt, and the logits that are wanted of it."""

    tokens: list[int]
    places: list[int]
    """Positions of tokens, ascending; the label is the token after them."""
    labels: list[list[int]]
    """Tokens of the labels at each place."""


class LabelLogits:
    """The label logits of several prompts, which run in common steps. Any thread may wait for them.

    Prompts share the keys and values of their common beginning. The first of them computes it, and the others continue
    it, so that its tokens are computed once. The logits have the bits of a prompt on its own."""

    def __init__(
        self,
        driver: EngineDriver,
        prompts: SequenceOf[LabelPlaces],
        cache_salt: str | None = None,
        adapter: AdapterKey = (),
    ) -> None:
        """Submits the prompts. `cache_salt` as in `LLMModel.add_request`. Raises ValueError for a prompt that is longer
        than the engine holds."""
        engine = driver.engine
        self._driver = driver
        self.sequences: list[Sequence] = []
        self._outcomes: list[Future[list[Tensor]]] = []
        for prompt in prompts:
            if len(prompt.tokens) > engine.max_length:
                raise ValueError(
                    f"the state and a question have {len(prompt.tokens)} tokens, but this model can take at most "
                    f"{engine.max_length}: {engine.explain_length_limit(len(prompt.tokens))}"
                )
            strategy = _collector(prompt)
            sequence = Sequence(prompt.tokens, strategy, NeverStops(), engine.max_length)
            sequence.wanted_from, sequence.sink = prompt.places[0], OutcomeSink()
            sequence.cache_salt, sequence.adapter = cache_salt, adapter
            self.sequences.append(sequence)
            self._outcomes.append(strategy.outcome)
        _share_beginnings(self.sequences, engine.model)
        driver.submit(self.sequences)

    def result(self) -> list[list[Tensor]]:
        """Waits, and returns float32 `[labels]` for each place of each prompt. Raises the error of a step."""
        try:
            return [outcome.result() for outcome in self._outcomes]
        finally:
            self.cancel()

    async def aresult(self) -> list[list[Tensor]]:
        """The same for a task of an event loop. Cancelling the task ends the work after the current step."""
        try:
            return list(await asyncio.gather(*map(asyncio.wrap_future, self._outcomes)))
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Frees the memory after the current step. Harmless if all is done."""
        self._driver.abort(self.sequences)


def _collector(prompt: LabelPlaces) -> Collector:
    """Returns a strategy whose outcome is the logits of the labels at each place."""
    found: dict[int, Tensor] = {}

    def collect(ops: Any, logits: Tensor, first: int) -> list[Tensor] | None:
        for place, labels in zip(prompt.places, prompt.labels):
            if first <= place < first + logits.shape[0]:
                row = logits[place - first][torch.tensor(labels)].float()
                if not torch.isfinite(row).all():
                    raise ValueError(f"the model's logits are not finite after {place + 1} tokens")
                found[place] = row
        return [found[place] for place in prompt.places] if len(found) == len(prompt.places) else None

    return Collector(collect)


def _share_beginnings(sequences: list[Sequence], model: Any) -> None:
    """Lets sequences with a common beginning share it: those whose positions have the same angles."""
    groups: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(model.rope_regime(sequence.rope_length), []).append(sequence)
    for first, *others in groups.values():
        num_common = len(commonprefix([first.tokens, *(other.tokens for other in others)]))
        num_shared = min(num_common, *(sequence.logits_from for sequence in (first, *others)))
        if others and num_shared >= BLOCK_SIZE:
            first.share_prompt(others, num_shared)
