"""A model of vectors and scores for an event loop: `EmbeddingService` takes jobs and returns their values."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from pace import __version__
from pace.llm.embedding_model import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.engine.driver import StepDriver
from pace.llm.loading.options import LoadOptions
from pace.server.embeddings.jobs import CLASSIFY, EMBED, SCORE, Encoded, EncodingJob
from pace.server.embeddings.metrics import EncodingMetrics
from pace.server.embeddings.running import run_in_parts
from pace.server.embeddings.texts import TextReader
from pace.server.errors import ApiError, invalid
from pace.server.models.base import ModelService, why_unwell
from pace.server.models.shared import Shared
from pace.server.options import ServeOptions
from pace.server.prompts import PromptReader

TEXTS_AT_ONCE = 64
"""Texts of different requests in the model at once: a step of 1,024 tokens has room for 64 queries of 16 tokens."""
MAX_ROWS = 32
"""Places that one request takes in the queue at most: few of its texts are in the model at once."""
READ_TOGETHER = 64
"""Texts that are tokenised in one go. Between them, other requests have their turns."""
PATHS = {EMBED: "/v1/embeddings", SCORE: "/v1/rerank and /v1/score", CLASSIFY: "/v1/classify"}


class EmbeddingService(ModelService):
    """Loads an EmbeddingModel, and answers jobs with it until it is unloaded or drained. A `HostedModel` of a pool.

    `load`, `unload` and `close` may be called on any thread, everything else on the event loop.
    """

    task = "embed"
    does = "makes vectors or scores of texts, and answers /v1/embeddings, /v1/rerank, /v1/score or /v1/classify"

    def __init__(self, options: ServeOptions, arguments: Mapping[str, Any], shared: Shared | None = None) -> None:
        """`arguments` are fields of `LoadOptions`. `shared` has the workers of a pool; by default, the model has its
        own. Raises ValueError for options of models that generate text."""
        for name in ("lora", "lora_dir", "media", "media_hosts", "prefix_dir"):
            if getattr(options, name):
                raise ValueError(f"{name} is for models that generate text, and {options.model} makes vectors")
        super().__init__(options, shared)
        self.model: EmbeddingModel | None = None
        self.labels: dict[int, str] = {}
        """Names of the classifier's labels."""
        self.prefixes = None
        self._arguments = arguments
        self._texts: TextReader | None = None
        self._reading = asyncio.Lock()
        """Held while texts are read, so that one worker is left for other models."""
        self._described: dict[str, Any] = {}
        """Members of its entry in `/v1/models`; empty before the first load."""
        self._metrics = EncodingMetrics(
            options.metrics_prefix,
            lambda: 0 if self.admission is None else self.admission.num_requests - self.admission.num_waiting,
            lambda: 0 if self.admission is None else self.admission.num_waiting,
        )

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        load = LoadOptions(**self._arguments)
        self.use(EmbeddingModel._open(load, keeps_dtype="dtype" not in self._arguments))

    def use(self, model: EmbeddingModel) -> None:
        """Serves a loaded model. Raises ValueError for dimensions that it does not have."""
        if self.options.dimensions is not None:
            model.check_dimensions(self.options.dimensions)
        model.embedder.driver.turns = self._turns
        self.max_length, self.labels = model.max_length, model.id2label
        self.reader = PromptReader(
            copy.deepcopy(model.tokenizer),
            model.embedder.vocab_size,
            model.max_length,
            self.limits,
            model_name=self.names[0],
        )
        self._texts = TextReader(model, self.limits)
        self.open_queue(TEXTS_AT_ONCE)
        self._described = {
            "max_model_len": model.max_length,
            "dimensions": self.options.dimensions or model.dimensions,
            "tasks": tasks_of(model),
        }
        self.model = model
        self.status = "ready"

    def unload(self) -> None:
        """Frees the weights. The metrics go on."""
        model, self.model = self.model, None
        self._texts = self.reader = None
        if model is not None:
            model.close()

    async def drain(self, seconds: float) -> None:
        """Takes no more work, and waits for running requests; cancels them after `seconds`."""
        self.status = "draining"
        deadline = time.monotonic() + seconds
        while self._tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """Frees the model. Closing twice is harmless."""
        self.shared.close()
        self.unload()

    # -- model information ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in requests; the first is its id."""
        return self.options.model_names

    @property
    def registry(self) -> CollectorRegistry:
        """Metrics of the model."""
        return self._metrics.registry

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request's body."""
        return self.limits.body_bytes

    @property
    def driver(self) -> StepDriver | None:
        return None if self.model is None else self.model.embedder.driver

    @property
    def described(self) -> dict[str, Any]:
        """Members of its entry in `/v1/models`."""
        return self._described

    def properties(self) -> dict[str, Any]:
        """Returns the answer of `/props`. Raises ApiError 503."""
        model = self.loaded
        return {
            "model_alias": self.names[0],
            "default_generation_settings": {"n_ctx": model.max_length},
            "tasks": tasks_of(model),
            "dimensions": self.options.dimensions or model.dimensions,
            "matryoshka_dimensions": list(model.matryoshka_dimensions),
            "prompts": model.prompts,
            "default_prompt_name": model.default_prompt_name,
            "embedding_tasks": list(model.tasks),
            "labels": list(model.id2label.values()),
            "build_info": f"pace {__version__}",
        }

    @property
    def loaded(self) -> EmbeddingModel:
        """The model. Raises ApiError 503 before it is loaded, and during shutdown."""
        if self.status != "ready" or self.model is None:
            raise self.not_ready()
        return self.model

    # -- for endpoints -------------------------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> str:
        """Returns the model's name for the answer."""
        return self.names[0] if name is None else name

    async def fetch_images(self, request: Any, check: Any) -> None:
        """Does nothing: texts have no images."""

    # -- work ----------------------------------------------------------------------------------------------------------

    async def encode(
        self,
        job: EncodingJob,
        form: Callable[[Encoded], bytes],
        salt: str | None = None,
        key: str | None = None,
    ) -> tuple[Encoded, bytes]:
        """Returns the values of a job, and the body that `form` makes of them in a worker. `salt` and `key` are the
        client's. Raises ApiError."""
        model = self.loaded
        self.check_priority(job.priority)
        self._check(job, model)
        begin = time.perf_counter()
        with self.cancellable(), self.admission.request(key):
            texts = [replace(text, cache_salt=salt) for text in await self._read(job)]
            num_tokens = [len(text.tokens) for text in texts]
            async with self.admission.rows(min(len(texts), MAX_ROWS), sum(num_tokens), job.priority):
                rows = await self._compute(job, model, texts)
            answer = await self.work(self._answer, job, model, rows, num_tokens, form)
        self._metrics.ended(num_tokens, time.perf_counter() - begin)
        return answer

    def _check(self, job: EncodingJob, model: EmbeddingModel) -> None:
        """Raises ApiError if the model cannot do what a job asks for."""
        tasks = tasks_of(model)
        if job.what not in tasks:
            message = f"the model {self.names[0]!r} has no head for {PATHS[job.what]}; it answers "
            paths = ", ".join(PATHS[task] for task in tasks)
            raise ApiError(400, message + paths, param="model", code="unsupported_endpoint")
        if job.prompt is not None and job.prompt not in model.prompts:
            names = ", ".join(model.prompts) or "it has none"
            raise invalid("prompt_name", f"must be a prompt of this model ({names}), got {job.prompt[:40]!r}")
        if job.task is not None and job.task not in model.tasks:
            names = ", ".join(model.tasks) or "it has none"
            raise invalid("task", f"must be a task of this model ({names}), got {job.task[:40]!r}")
        if job.dimensions is not None:
            try:
                model.check_dimensions(job.dimensions)
            except (TypeError, ValueError) as error:
                raise ApiError(400, str(error), param="dimensions") from None

    async def _read(self, job: EncodingJob) -> list[TextTokens]:
        """Returns the tokens of all texts. Raises ApiError."""
        texts: list[TextTokens] = []
        num_tokens = 0
        for begin in range(0, len(job.texts), READ_TOGETHER):
            async with self._reading:
                part = await self.work(self._texts.read, job, begin, begin + READ_TOGETHER)
            texts += part
            num_tokens += sum(len(text.tokens) for text in part)
            if num_tokens > self.limits.input_tokens:
                name = job.places[0].partition("[")[0]
                raise invalid(name, f"has more than {self.limits.input_tokens} tokens, the maximum of a request")
        return texts

    async def _compute(self, job: EncodingJob, model: EmbeddingModel, texts: list[TextTokens]) -> Tensor:
        """Returns pooled rows or logits of texts that have a place in the model. Raises ApiError, and the error of a
        step."""
        submit = model.submit_rows if job.what == EMBED else model.submit_logits
        try:
            return await run_in_parts(submit, texts)
        except (RuntimeError, ValueError) as error:
            if why_unwell(model.embedder.driver) is None:
                raise  # a step failed, whose details are for the log; the model goes on
            raise ApiError(503, str(error)) from error

    def _answer(
        self,
        job: EncodingJob,
        model: EmbeddingModel,
        rows: Tensor,
        num_tokens: list[int],
        form: Callable[[Encoded], bytes],
    ) -> tuple[Encoded, bytes]:
        """Returns what a client gets of pooled rows or logits, as values and as a body. Runs in a worker."""
        encoded = Encoded(self._finish(job, model, rows), num_tokens)
        if not torch.isfinite(encoded.values).all():
            raise ApiError(500, "the model computed values that are not finite")
        return encoded, form(encoded)

    def _finish(self, job: EncodingJob, model: EmbeddingModel, rows: Tensor) -> Tensor:
        """Returns float32 values of pooled rows, or of logits."""
        if job.what == EMBED:
            return model.finish_rows(rows, job.dimensions or self.options.dimensions, job.normalise)
        if not job.use_activation:
            return rows
        return model.to_scores(rows)[:, None] if job.what == SCORE else model.to_probabilities(rows)


def tasks_of(model: EmbeddingModel) -> list[str]:
    """Returns what a model can be asked for: some of EMBED, SCORE and CLASSIFY."""
    can = {EMBED: True, SCORE: model.can_rank, CLASSIFY: model.num_labels > 0}
    return [task for task in PATHS if can[task]]
