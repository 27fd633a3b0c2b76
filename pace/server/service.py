"""One model for an event loop: takes jobs and returns answers. Endpoints reach the engine only through this module."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from pace.llm.chat.turn import Turn
from pace.llm.clients.adapters import Choice
from pace.llm.clients.decisions import LabelLogits
from pace.llm.configs import SamplingConfig
from pace.llm.decisions.decide import answers_of, places_of
from pace.llm.engine.driver import StepDriver
from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.llm.processors.prompts import Prompt, PromptEncoder
from pace.llm.sequence import AdapterKey, Sequence
from pace.server.answers import Answer
from pace.server.decisions.request import DecisionRequest
from pace.server.errors import ApiError, invalid, not_served
from pace.server.fingerprint import fingerprint
from pace.server.jobs import GenerationJob, PreparedJob
from pace.server.metrics import Metrics
from pace.server.models.base import ModelService
from pace.server.models.shared import WORKERS, Shared
from pace.server.network.remote import RemoteImage, remote_images
from pace.server.options import ServeOptions
from pace.server.prefixes.request import PrefixRequest
from pace.server.prefixes.store import OFF, Prefixes, whole_blocks
from pace.server.prompts import PromptReader
from pace.server.wire.props import properties
from pace.server.workers import GrammarWorkers

logger = logging.getLogger("pace")


class Service(ModelService):
    """Loads a model, and answers jobs with it until it is unloaded or drained. A `HostedModel` of a pool.

    `load`, `unload` and `close` may be called on any thread, everything else on the event loop.
    """

    task = "generate"
    does = "generates text; start the server with --task embed to get vectors and scores"

    def __init__(self, options: ServeOptions, load: LoadOptions, shared: Shared | None = None) -> None:
        """`shared` has the workers of a pool; by default, the model has its own. Raises ValueError for an option of
        models that make vectors."""
        if options.dimensions is not None:
            raise ValueError("dimensions needs task=embed: this model generates text, and makes no vectors")
        super().__init__(options, shared)
        self.load_options = load
        self.generator: Generator | None = None
        self.takes_media = False
        self.fingerprint = ""
        self.metrics = Metrics(options.metrics_prefix, self)
        self._grammar_workers = GrammarWorkers(self.limits)
        self.prefixes: Prefixes | None = None
        """The kept prefixes; None if none are kept."""
        self._answers: set[Answer] = set()

    # -- life cycle ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        loaded = load.open_model(self.load_options)
        parts = loaded.engine, loaded.tokenizer, loaded.defaults
        self.use(Generator(*parts, encoder=loaded.encoder, checkpoint=loaded.checkpoint))

    def use(self, generator: Generator) -> None:
        """Serves a loaded model. Raises ValueError for media that it does not take."""
        engine, kinds = generator.engine, self.options.media
        generator.driver.turns = self._turns
        missing = set(kinds or ()) - set(generator.encoder.processors)
        if missing:
            raise ValueError(f"media={','.join(kinds)}: {generator.encoder.all.refusal(missing.pop())}")
        if self.options.media_hosts and "image" not in generator.encoder.processors:
            refusal = generator.encoder.all.refusal("image")
            raise ValueError(f"media_hosts={','.join(self.options.media_hosts)}: {refusal}")
        encoder = PromptEncoder(generator.encoder.all, generator.tokenizer, self.options.max_image_tokens, kinds)
        names = self.options.model_names
        lengths = engine.model.vocab_size, engine.max_length
        self.reader = PromptReader(generator.tokenizer, *lengths, self.limits, encoder, names[0])
        self.open_queue(engine.scheduler.max_sequences_per_step)
        self.fingerprint = fingerprint(self.load_options)
        if self.prefixes is not None:
            self.prefixes.attach(generator.driver)
        elif self.options.prefix_dir is not None:
            self.prefixes = Prefixes(Path(self.options.prefix_dir).expanduser(), generator.driver, self.limits)
        self.max_length = self.reader.max_length
        self.takes_media = bool(encoder.processors)
        self.generator = generator
        _ = generator.decider.own_config  # a damaged one is found now, not by a client
        self.adapters.attach(generator.adapters)
        self._warm_workers()
        generator.constraints.grammars.cache_bytes = self.limits.grammar_cache_bytes
        generator.constraints.grammars.start()
        self.status = "ready"

    def _warm_workers(self) -> None:
        """Makes the tokenizer copy of each worker, so that no client waits for it."""
        if self.generator.tokenizer is None:
            return
        together = threading.Barrier(WORKERS)

        def warm() -> None:
            together.wait()
            self.reader.encode("a")

        for future in [self.shared.workers.submit(warm) for _ in range(WORKERS)]:
            future.result()

    def unload(self) -> None:
        """Frees weights and caches. Kept prefixes stay in their files, and the metrics go on."""
        generator, self.generator = self.generator, None
        if generator is None:
            return
        if self.prefixes is not None:
            self.prefixes.attach(None)
        self.adapters.detach()
        generator.driver.close()
        self.reader = None

    async def drain(self, seconds: float) -> None:
        """Takes no more work, and waits for running requests; cancels them after `seconds`."""
        self.status = "draining"
        deadline = time.monotonic() + seconds
        while self.admission is not None and self.admission.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for running in (*self._answers, *self._tasks):
            running.cancel()
        deadline = time.monotonic() + 1.0
        while self.admission is not None and self.admission.num_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.005)  # for the last bytes of streams

    def close(self) -> None:
        """Frees the model. Closing twice is harmless."""
        self.shared.close()
        self._grammar_workers.close()
        if self.prefixes is not None:
            self.prefixes.close()
        if self.generator is not None:
            self.generator.driver.close()
            self.generator = None

    @property
    def driver(self) -> StepDriver | None:
        return None if self.generator is None else self.generator.driver

    # -- model information ---------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the model in requests, the first is its id; then those of its adapters."""
        return (*self.options.model_names, *self.adapters.names)

    @property
    def registry(self) -> CollectorRegistry:
        """Metrics of the model."""
        return self.metrics.registry

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request's body. Before the first load, the model may be one that takes images."""
        may_take_media = self.options.media != () if self.max_length is None else self.takes_media
        return max(self.limits.body_bytes, self.limits.media_body_bytes if may_take_media else 0)

    @property
    def described(self) -> dict[str, Any]:
        """Members of the model's entry in `/v1/models`; none until it was loaded once."""
        return {} if self.max_length is None else {"max_model_len": self.max_length}

    def properties(self) -> dict[str, Any]:
        """Returns the answer of `/props`. Must run in a worker. Raises ApiError 503."""
        return properties(self.loaded, self.names[0], self.reader, self.limits)

    def check_model(self, name: str | None) -> str:
        """Returns the model's name for the answer. Raises ApiError for a model that is not served."""
        if name is None:
            return self.names[0]
        if len(name) > self.limits.name_characters:
            raise invalid("model", f"must have at most {self.limits.name_characters} characters")
        if name not in self.names and not self.options.any_model_name:
            raise not_served(name, self.names)
        return name

    @property
    def loaded(self) -> Generator:
        """The generator. Raises ApiError 503 before the model is loaded, and during shutdown."""
        if self.status != "ready" or self.generator is None:
            raise self.not_ready()
        try:
            _ = self.generator.engine
        except (RuntimeError, ValueError) as error:  # it has ended
            raise ApiError(503, str(error), headers={"x-should-retry": "false"}) from None
        return self.generator

    async def fetch_images(self, request: Any, check: Callable[[int], None]) -> None:
        """Puts the images themselves in place of URLs of allowed hosts. `check` takes their size so far. Raises
        ApiError, and what `check` raises."""
        fetcher = self.shared.fetcher
        if fetcher is None or "image" not in self.reader.encoder.processors:
            return
        found = [(image, address) for image in remote_images(request) if (address := fetcher.find(image.url))]
        if not found:
            return
        self.check_model(request.model)
        self.check_ready()
        if len(found) > self.limits.images:
            place = found[self.limits.images][0].place
            raise invalid(place, f"is one of more than {self.limits.images} images, the maximum of a request")
        files = await fetcher.fetch([(image.place, address) for image, address in found], check)
        await self.work(_put_all, [image for image, _ in found], files)

    async def keep_prefix(self, request: PrefixRequest, salt: str | None, key: str | None) -> dict[str, Any]:
        """Computes a prefix, and keeps it under its name. `salt` and `key` are the client's. Raises ApiError."""
        if self.prefixes is None:
            raise ApiError(400, OFF, param="name", code="prefixes_not_kept")
        self.check_ready()
        with self.admission.request(key):
            prompt = whole_blocks(await self.work(request.read, self.reader, self.limits))
            if not prompt.tokens:
                raise invalid("prompt" if request.messages is None else "messages", "must have more than 16 tokens")
            self.reader.check_length(prompt.tokens)
            async with self.shared.media_workers.prepared([prompt]), self.admission.rows(1, len(prompt.tokens), 0):
                return await self.prefixes.save(request.name, prompt, salt, joined_salt(salt, request.cache_salt))

    async def decide(
        self, request: DecisionRequest, salt: str | None, key: str | None, adapter: Choice = None
    ) -> dict[str, Any]:
        """Returns the answers and the usage of a decision request. `salt` and `key` are the client's. Raises
        ApiError."""
        generator = self.loaded
        with self.cancellable(), self.admission.request(key):
            config, prompts = await self.work(request.read, generator.decider, self.reader)
            num_tokens = sum(len(prompt.tokens) for prompt in prompts)
            num_rows = min(generator.engine.scheduler.max_sequences_per_step, len(prompts))
            async with self.admission.rows(num_rows, num_tokens, 0):
                with self.adapters.using(adapter) as adapters:
                    logits = await LabelLogits(generator.driver, places_of(prompts), salt, adapters).aresult()
            usage = {"input_tokens": num_tokens, "output_tokens": 0}
            return {"answers": answers_of(prompts, logits, config), "usage": usage}

    # -- work ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def answer(
        self, job: GenerationJob, salt: str | None = None, key: str | None = None, adapter: Choice = None
    ) -> AsyncIterator[Answer]:
        """Yields the answer of a job, which ends with the block. `salt` and `key` are the client's. Raises ApiError."""
        self.check_priority(job.priority)
        generator = self.loaded
        with self.admission.request(key), self.adapters.using(adapter) as adapters:
            prompts, config, turn, prepared = await self.work(self._begin, generator, job, salt, adapters)
            compiled = None
            if config.grammar is not None:
                param = job.structure and job.structure.param
                with _errors_of(job):
                    compiled = await self._grammar_workers.compile(
                        generator.constraints.grammars, config.grammar, param
                    )
            async with AsyncExitStack() as held:
                await held.enter_async_context(self.shared.media_workers.prepared(prompts))
                if self.prefixes is not None and not adapter:
                    prefixes = self.prefixes.restored(prompts, joined_salt(salt, job.cache_salt))
                    await held.enter_async_context(prefixes)
                if prepared is None:
                    prepared = await self.work(self._prepare, generator, job, prompts, config, turn, salt, adapters)
                del compiled, prompts  # kept until here, so that a grammar is not compiled again
                async with self._running(generator, prepared) as answer:
                    yield answer

    @asynccontextmanager
    async def _running(self, generator: Generator, prepared: PreparedJob) -> AsyncIterator[Answer]:
        """Yields the answer of a prepared job, once it has a place in the engine."""
        samples = prepared.samples
        max_running = max(generator.engine.scheduler.max_sequences_per_step, *map(len, samples))
        num_rows = min(max_running, sum(map(len, samples)))
        num_tokens = sum(group[0].num_prompt_tokens for group in samples)
        async with self.admission.rows(num_rows, num_tokens, prepared.job.priority):
            try:
                answer = Answer(generator.driver, prepared, generator.tokenizer, max_running)
            except (RuntimeError, ValueError) as error:
                raise ApiError(503, str(error)) from error
            self._answers.add(answer)
            try:
                yield answer
            finally:
                self._answers.discard(answer)
                answer.cancel()
                self._measure(samples)
                self.metrics.ended(samples)

    def _begin(
        self, generator: Generator, job: GenerationJob, salt: str | None, adapter: AdapterKey
    ) -> tuple[list[Prompt], SamplingConfig, Turn | None, PreparedJob | None]:
        """Returns what `_read` does, and the prepared job; None if a grammar, media or kept prefixes come first: they
        have workers of their own. Runs in a worker. Raises ApiError."""
        prompts, config, turn = self._read(generator, job)
        is_plain = config.grammar is None and self.prefixes is None and not any(prompt.counted for prompt in prompts)
        prepared = self._prepare(generator, job, prompts, config, turn, salt, adapter) if is_plain else None
        return prompts, config, turn, prepared

    def _read(self, generator: Generator, job: GenerationJob) -> tuple[list[Prompt], SamplingConfig, Turn | None]:
        """Returns each prompt, the sampling config, and the turn of a conversation. Runs in a worker.
        Raises ApiError."""
        config = job.sampling.copy()
        grammar = None if job.structure is None else job.structure.read(self.limits.grammar)
        prompts, turn, infill = self.reader.read(job, grammar)
        config.grammar = grammar if turn is None else turn.grammar
        if infill is not None:
            infill.add_ends(config, generator.defaults)
        if config.thinking_budget is not None and not self.reader.has_thoughts:
            config.thinking_budget = self.reader.pass_over_budget(job)
        room = generator.engine.max_length - min(len(prompt.tokens) for prompt in prompts)
        config.max_new_tokens = room if job.max_tokens is None else max(1, min(job.max_tokens, room))
        config.min_new_tokens = min(config.min_new_tokens, config.max_new_tokens)
        if job.bad_words:
            config.bad_words_ids = self.reader.bad_words(job.bad_words)
        return prompts, config, turn

    def _prepare(
        self,
        generator: Generator,
        job: GenerationJob,
        prompts: list[Prompt],
        config: SamplingConfig,
        turn: Turn | None,
        salt: str | None,
        adapter: AdapterKey,
    ) -> PreparedJob:
        """Returns the job with its sequences. Runs in a worker. Raises ApiError."""
        with _errors_of(job):
            prepared = generator.prepare_for_generate(prompts, config, turn, job.skip_special_tokens)
            prepared = dataclasses.replace(prepared, adapter=adapter)
        samples = [generator.sequences_of(prepared, index) for index in range(len(prompts))]
        for group in samples:
            for sequence in group:
                sequence.priority = job.priority
                sequence.cache_salt = joined_salt(salt, job.cache_salt)
        return PreparedJob(job, samples, turn, prepared.warnings)

    def _measure(self, samples: list[list[Sequence]]) -> None:
        """Reports the time of each prompt's prefill to the queue."""
        for group in samples:
            times = group[0].stats
            if times.first_token is not None and times.admitted is not None:
                self.admission.measured(
                    group[0].num_prompt_tokens - times.num_reused, times.first_token - times.admitted
                )


def _put_all(images: list[RemoteImage], files: list[bytes]) -> None:
    for image, data in zip(images, files, strict=True):
        image.put(data)


@contextmanager
def _errors_of(job: GenerationJob) -> Iterator[None]:
    """Converts errors of preparing a job to an ApiError that names the wrong field."""
    place = job.structure and job.structure.param
    try:
        yield
    except ModuleNotFoundError as error:  # llguidance
        raise ApiError(501, str(error), param=place) from None
    except (TypeError, ValueError) as error:
        raise ApiError(400, str(error), param=getattr(error, "place", None) or place) from None


def joined_salt(of_key: str | None, of_request: str | None) -> str | None:
    """Returns the combined salt of a request: different pairs give different salts."""
    if of_request is None:
        return of_key
    return hashlib.sha256(f"{of_key or ''}/{of_request}".encode()).hexdigest()
