"""Batch inference on Ray Data: `ds.map_batches(Predictor, ...)`."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from pace.integrations.ray.threads import assigned_threads
from pace.llm import LLMModel, SamplingConfig

AT_ONCE = 128
"""Rows in the engine: twice those of a step, so that the engine never waits for rows."""


class Predictor:
    """Continues prompts or answers conversations of a column. Each actor has one engine, with one thread per CPU of the
    actor:

        ds.map_batches(
            Predictor,
            fn_constructor_kwargs={"model": PATH, "prompts": "question", "sampling": {"max_new_tokens": 64}},
            num_cpus=8, concurrency=2, batch_size=256,
        )
    """

    def __init__(
        self,
        model: str,
        *,
        prompts: str | None = None,
        messages: str | None = None,
        texts: str = "text",
        finish_reasons: str | None = None,
        errors: str | None = None,
        sampling: dict[str, Any] | SamplingConfig | None = None,
        **load_options: Any,
    ) -> None:
        """`prompts`: the column of prompts, texts or token ids. Or `messages`: the column of conversations, lists of
        dicts with `role` and `content`.
        `texts`, `finish_reasons`, `errors`: columns to add. With `errors`, a row that fails has its reason there, "" as
        its text and "error" as its finish reason; other rows have "". Without it, the first failure fails the batch.
        `sampling`: a SamplingConfig or its fields. `load_options`: arguments of LLMModel except `num_threads`.
        Raises ValueError or TypeError for columns that collide, and what LLMModel raises.
        """
        if (prompts is None) == (messages is None):
            raise ValueError("give prompts, the column of prompts, or messages, that of conversations")
        self._column = prompts if messages is None else messages
        self._outputs = [name for name in (texts, finish_reasons, errors) if name is not None]
        if len({self._column, *self._outputs}) <= len(self._outputs):
            raise ValueError(f"columns must have names of their own; got {', '.join([self._column, *self._outputs])}")
        self._texts, self._finish_reasons, self._errors = texts, finish_reasons, errors
        self._is_chat = messages is not None
        self._sampling = sampling if isinstance(sampling, SamplingConfig) else SamplingConfig(**(sampling or {}))
        if self._sampling.num_return_sequences != 1:
            raise ValueError("num_return_sequences: a row has one text; repeat the row for more")
        if "num_threads" in load_options:
            raise TypeError("num_threads is num_cpus of map_batches: as many threads as the actor has CPUs")
        self._model = LLMModel(model, **{"progress": False, **load_options}, num_threads=assigned_threads())
        self._workers = ThreadPoolExecutor(AT_ONCE, "pace-rows")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the batch with the added columns. Its rows share the steps of the engine. Raises KeyError if the
        input column is missing, and ValueError if an added column already exists."""
        if self._column not in batch:
            raise KeyError(f"there is no column {self._column!r}; there are {', '.join(batch)}")
        if taken := [name for name in self._outputs if name in batch]:
            raise ValueError(f"the batch has a column {taken[0]!r} already: give another name")
        rows = list(self._workers.map(self._answer, batch[self._column]))
        columns = {self._texts: 0, self._finish_reasons: 1, self._errors: 2}
        written = {name: [row[part] for row in rows] for name, part in columns.items() if name is not None}
        return {**batch, **{name: np.array(values, dtype=object) for name, values in written.items()}}

    def _answer(self, value: Any) -> tuple[str, str, str]:
        """Returns text, finish reason and error of a row."""
        try:
            if self._is_chat:
                answer = self._model.chat([_plain(message) for message in value], self._sampling)
                return answer.text, answer.finish_reason, ""
            output = self._model.add_request(_plain(value), self._sampling).result()
            return output.texts[0], output.finish_reasons[0], ""
        except (TypeError, ValueError) as error:
            if self._errors is None:
                raise
            return "", "error", str(error)


def _plain(value: Any) -> Any:
    """Converts a value of a column to plain Python: arrays become lists, and members that Arrow filled with None are
    removed."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value.tolist()]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
