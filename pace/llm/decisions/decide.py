"""`Decider`: decisions of one model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pace.llm.clients.decisions import LabelPlaces
from pace.llm.decisions.config import DecisionConfig

if TYPE_CHECKING:
    from pace.llm.decisions.prompts import DecisionPrompt, DecisionPrompts


class Decider:
    """Prompts and answers of a model. Threads may share it."""

    def __init__(self, tokenizer: Any, checkpoint: Path | None) -> None:
        """`checkpoint` is the directory or file of the model, which may have a decision.json."""
        self._tokenizer = tokenizer
        self._directory = checkpoint if checkpoint is not None and checkpoint.is_dir() else None
        self._last: DecisionPrompts | None = None
        self._lock = threading.Lock()

    @cached_property
    def own_config(self) -> DecisionConfig:
        """The config of the checkpoint. Raises the errors of `DecisionConfig.read`."""
        return DecisionConfig() if self._directory is None else DecisionConfig.read(self._directory)

    def prompts(self, config: DecisionConfig | str | Path | None = None) -> DecisionPrompts:
        """Returns the maker of prompts for a config: one, its path, or None for the checkpoint's own. Raises the errors
        of `DecisionConfig.read` and `DecisionPrompts`."""
        from pace.llm.decisions.prompts import DecisionPrompts  # imported here, since plain text needs no Jinja

        if config is None:
            config = self.own_config
        elif not isinstance(config, DecisionConfig):
            config = DecisionConfig.read(config)
        with self._lock:
            if self._last is None or self._last.config != config:
                self._last = DecisionPrompts(self._tokenizer, config)
            return self._last


def places_of(prompts: Sequence[DecisionPrompt]) -> list[LabelPlaces]:
    """Returns what the engine computes for prompts."""
    return [LabelPlaces(prompt.tokens, prompt.places, prompt.labels) for prompt in prompts]


def answers_of(
    prompts: Sequence[DecisionPrompt], logits: Sequence[Sequence[Tensor]], config: DecisionConfig
) -> dict[str, dict[str, Any]]:
    """Returns the answer to each question by name, given float32 `[options]` for each question of each prompt."""
    answers: dict[str, dict[str, Any]] = {}
    for prompt, rows in zip(prompts, logits, strict=True):
        for question, row in zip(prompt.questions, rows, strict=True):
            scores = row / float(config.temperature.get(question.type, 1.0))
            answers[question.name] = question.answer(scores.softmax(-1).tolist())
    return answers
