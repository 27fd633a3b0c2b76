"""A model of vectors and scores for an event loop: `EmbeddingService` takes jobs and returns their values."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pace import __version__
from pace.llm.embedding_model import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.loading.options import LoadOptions
from pace.server.admission import Admission
from pace.server.embeddings.jobs import CLASSIFY, EMBED, SCORE, Encoded, EncodingJob
from pace.server.embeddings.metrics import EncodingMetrics
from pace.server.embeddings.running import run_in_parts
from pace.server.embeddings.texts import TextReader
from pace.server.errors import ApiError, invalid
from pace.server.options import ServeOptions
from pace.server.prompts import PromptReader
from pace.server.service import Service

TEXTS_AT_ONCE = 128
"""Texts of different requests in the model at once: a step of 2,048 tokens has room for 128 queries of 16 tokens."""
MAX_ROWS = 32
"""Places that one request takes in the queue at most: few of its texts are in the model at once."""
READ_TOGETHER = 64
"""Texts that are tokenised in one go. Between them, other requests have their turns."""
PATHS = {EMBED: "/v1/embeddings", SCORE: "/v1/rerank and /v1/score", CLASSIFY: "/v1/classify"}


class EmbeddingService(Service):
    """Loads an EmbeddingModel, and answers jobs with it until it is drained.

    `load`, `unload` and `close` may be called on any thread, everything else on the event loop.
    """

    task = "embed"
    does = "makes vectors or scores of texts, and answers /v1/embeddings, /v1/rerank, /v1/score or /v1/classify"

    def __init__(self, options: ServeOptions, arguments: Mapping[str, Any]) -> None:
        """`arguments` are those of `EmbeddingModel`."""
        super().__init__(options, LoadOptions(options.model))
        self._arguments = arguments
        self.model: EmbeddingModel | None = None
        self._texts: TextReader | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._counted = EncodingMetrics(
            options.metrics_prefix,
            lambda: 0 if self.admission is None else self.admission.num_requests - self.admission.num_waiting,
            lambda: 0 if self.admission is None else self.admission.num_waiting,
        )

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Loads the model. Raises what `EmbeddingModel` raises."""
        try:
            self.use_model(EmbeddingModel(**self._arguments))
        except BaseException:
            self.status = "failed"
            raise

    def use_model(self, model: EmbeddingModel) -> None:
        """Serves a loaded model. Raises ValueError for options that it cannot fulfil."""
        if self.options.dimensions is not None:
            model.check_dimensions(self.options.dimensions)
        self.model = model
        self._texts = TextReader(model, self.limits)
        self.reader = PromptReader(model.tokenizer, model.embedder.vocab_size, model.max_length, self.limits)
        self.admission = Admission(self.limits, TEXTS_AT_ONCE, self._counted.rejected)
        self.status = "ready"

    async def drain(self, seconds: float) -> None:
        self.status = "draining"
        deadline = time.monotonic() + seconds
        while self._tasks and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        super().close()
        if self.model is not None:
            self.model.close()
            self.model = None

    # -- model information ---------------------------------------------------------------------------------------------

    @property
    def tasks(self) -> list[str]:
        """What the model can be asked for: some of EMBED, SCORE and CLASSIFY."""
        model = self.ready_model
        can = {EMBED: model.dimensions > 0, SCORE: model.can_rank, CLASSIFY: model.num_labels > 0}
        return [task for task in PATHS if can[task]]

    @property
    def labels(self) -> dict[int, str]:
        """Names of the classifier's labels."""
        return self.ready_model.id2label

    @property
    def described(self) -> dict[str, Any]:
        if self.model is None:
            return {}
        return {"max_model_len": self.model.max_length, "dimensions": self.model.dimensions, "tasks": self.tasks}

    def properties(self) -> dict[str, Any]:
        model = self.ready_model
        return {
            "model_alias": self.options.model_names[0],
            "default_generation_settings": {"n_ctx": model.max_length},
            "dimensions": self.options.dimensions or model.dimensions,
            "matryoshka_dimensions": model.matryoshka_dimensions,
            "prompts": model.prompts,
            "default_prompt_name": model.default_prompt_name,
            "labels": list(model.id2label.values()),
            "tasks": self.tasks,
            "build_info": f"pace {__version__}",
        }

    def check_ready(self) -> None:
        _ = self.ready_model

    @property
    def ready_model(self) -> EmbeddingModel:
        """The model. Raises ApiError 503 before it is loaded, and during shutdown."""
        if self.status != "ready" or self.model is None:
            raise self.not_ready()
        return self.model

    # -- work ----------------------------------------------------------------------------------------------------------

    async def encode(self, job: EncodingJob, key: str | None = None) -> Encoded:
        """Returns the values of a job. `key` is the client's. Raises ApiError."""
        model = self.ready_model
        if job.priority and not self.options.allow_priority:
            message = "priority is disabled here (start the server with --allow-priority); leave it out, or send 0"
            raise ApiError(400, message, param="priority")
        self._check(job, model)
        begin = time.perf_counter()
        with self._running(), self.admission.request(key):
            texts = await self._read(job)
            num_tokens = [len(text.tokens) for text in texts]
            async with self.admission.rows(min(len(texts), MAX_ROWS), sum(num_tokens), job.priority):
                values = await self._compute(job, model, texts)
        self._counted.ended(num_tokens, time.perf_counter() - begin)
        return Encoded(values, num_tokens)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Lets `drain` cancel the block, which then raises ApiError 503."""
        task = asyncio.current_task()
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.status == "draining" and not task.uncancel():
                raise self.not_ready() from None
            raise
        finally:
            self._tasks.discard(task)

    def _check(self, job: EncodingJob, model: EmbeddingModel) -> None:
        """Raises ApiError if the model cannot do what a job asks for."""
        if job.what not in self.tasks:
            can = ", ".join(PATHS[task] for task in self.tasks)
            raise ApiError(
                400, f"the model {self.options.model_names[0]!r} has no head for {PATHS[job.what]}; it answers {can}",
                param="model",
                code="unsupported_endpoint",
            )  # fmt: skip
        if job.prompt is not None and job.prompt not in model.prompts:
            names = ", ".join(model.prompts) or "none"
            raise invalid("prompt_name", f"must be a prompt of this model ({names}), got {job.prompt[:40]!r}")
        if job.dimensions is not None:
            try:
                model.check_dimensions(job.dimensions)
            except ValueError as error:
                raise ApiError(400, str(error), param="dimensions") from None

    async def _read(self, job: EncodingJob) -> list[TextTokens]:
        """Returns the tokens of all texts. Raises ApiError."""
        texts: list[TextTokens] = []
        num_tokens = 0
        for begin in range(0, len(job.texts), READ_TOGETHER):
            part = await self.work(self._texts.read, job, begin, begin + READ_TOGETHER)
            texts += part
            num_tokens += sum(len(text.tokens) for text in part)
            if num_tokens > self.limits.input_tokens:
                name = job.places[0].partition("[")[0]
                raise invalid(name, f"has more than {self.limits.input_tokens} tokens, the maximum of a request")
        return texts

    async def _compute(self, job: EncodingJob, model: EmbeddingModel, texts: list[TextTokens]) -> Tensor:
        """Returns float32 rows for texts that have a place in the model. Raises ApiError."""
        submit = model.submit_rows if job.what == EMBED else model.submit_logits
        try:
            rows = await run_in_parts(submit, texts)
            values = await self.work(self._finish, job, model, rows)
        except (RuntimeError, ValueError) as error:
            raise ApiError(503, str(error)) from error
        if not torch.isfinite(values).all():
            raise ApiError(500, "the model computed values that are not finite")
        return values

    def _finish(self, job: EncodingJob, model: EmbeddingModel, rows: Tensor) -> Tensor:
        """Returns what a client gets of pooled rows, or of logits."""
        if job.what == EMBED:
            return model.finish_rows(rows, job.dimensions or self.options.dimensions, job.normalise)
        if not job.use_activation:
            return rows
        return model.to_scores(rows)[:, None] if job.what == SCORE else model.to_probabilities(rows)
