"""`Pace`: a model of pace for guidance's programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

from guidance._ast import ASTNode, Function
from guidance._schema import SamplingParams
from guidance.chat import ChatTemplate
from guidance.models import Model

from pace.integrations.guidance.engine import PaceEngine
from pace.integrations.guidance.interpreter import PaceInterpreter
from pace.integrations.guidance.sampling import Sampling
from pace.llm import LLMModel


class Pace(Model):
    """A model that guidance's programs are added to.

    Like all of guidance's models it is immutable: each `+` returns a new branch. Branches share the weights and their
    common prefix, and may run in several threads at once.
    """

    def __init__(
        self,
        model: str | Path | LLMModel,
        *,
        echo: bool = True,
        chat_template: str | type[ChatTemplate] | None = None,
        enable_backtrack: bool = True,
        enable_ff_tokens: bool = True,
        enable_monitoring: bool = False,
        sampling_params: SamplingParams | None = None,
        interpreter_cls: type[PaceInterpreter] = PaceInterpreter,
        seed: int | None = None,
        max_branches: int = 32,
        **load_options: Any,
    ) -> None:
        """`model`: a local directory, a GGUF file or a Hub id, loaded with `load_options` (arguments of `LLMModel`); or
        a loaded LLMModel, which may be shared.
        `echo`: compute the probabilities of all tokens, for guidance's display.
        `chat_template`: a Jinja template, or a ChatTemplate of guidance; by default the tokenizer's own.
        `sampling_params`: `top_p`, `top_k`, `min_p`, `repetition_penalty`, `seed`.
        `seed`: for programs whose `sampling_params` have no seed; without either, numpy's global generator is used.
        `max_branches`: number of branches that keep their keys and values, and of threads that can compute at once.

        Raises: what `LLMModel` raises; ValueError for a model without a tokenizer; TypeError for load options with a
        loaded model.
        """
        self._is_ours = not isinstance(model, LLMModel)
        if not self._is_ours and load_options:
            raise TypeError(f"{', '.join(load_options)} apply to loading, but this model is already loaded")
        if not isinstance(model, (str, os.PathLike, LLMModel)):
            raise TypeError(f"model is a path, a Hub id or an LLMModel; got {model!r:.80}")
        Sampling.read({**(sampling_params or {}), "seed": seed})
        if not isinstance(max_branches, int) or max_branches < 1:
            raise ValueError(f"max_branches is at least 1; got {max_branches!r}")
        engine = PaceEngine(
            LLMModel(model, **load_options) if self._is_ours else model,
            chat_template,
            seed,
            max_branches,
            enable_backtrack=enable_backtrack,
            enable_ff_tokens=enable_ff_tokens,
            enable_monitoring=enable_monitoring,
            enable_token_probabilities=echo,
            enable_top_k=echo,
        )
        self._max_branches = max_branches
        super().__init__(interpreter_cls(engine), sampling_params or SamplingParams(), echo)

    def with_sampling_params(self, sampling_params: SamplingParams) -> Pace:
        """Returns a branch with other sampling parameters."""
        Sampling.read(sampling_params)
        return super().with_sampling_params(sampling_params)

    def batch(self, programs: Iterable[Any]) -> list[Pace]:
        """Runs `programs` from this branch at once, and returns their results in order. They share the steps of the
        model. A program is anything that can be added to a model, or a function of one. After all have ended, the
        first error is raised."""
        programs = list(programs)
        if not programs:
            return []
        with ThreadPoolExecutor(min(len(programs), self._max_branches), "pace-guidance") as threads:
            runs = [threads.submit(copy_context().run, self._run, program) for program in programs]
        return [run.result() for run in runs]

    def close(self) -> None:
        """Frees the state of all branches, and the model if it was loaded here. No branch can be continued
        afterwards."""
        self.engine.close()
        if self._is_ours:
            self.engine.model_obj.close()

    def _run(self, program: str | ASTNode | Function | Callable[[Pace], Pace]) -> Pace:
        if isinstance(program, (str, ASTNode, Function)):
            return self + program
        return program(self)
