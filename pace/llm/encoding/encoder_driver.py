"""`EncoderDriver`: the `Embedder` of an encoder, which computes whole texts in steps on a thread of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from pace.llm.encoding.embedder import LOGITS, Pooling, TextTokens, What, check_texts, wait_for
from pace.llm.encoding.steps import MAX_LENGTH, MAX_TEXTS, MAX_TOKENS, TextSteps
from pace.llm.encoding.text_queue import EncoderMetrics, Job, TextQueue
from pace.llm.engine.driver import OfTheParent, StepDriver
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.runners.encoder import EncoderRunner
from pace.ops.checks import check_pooling


class EncoderDriver:
    """Computes rows and logits of texts on one thread, those of all callers together.

    A step has whole texts of at most MAX_TOKENS tokens, without padding; a longer text has a step of its own. Memory
    for activations, keys and values is that of the longest step so far. An error in a step fails the callers of the
    texts that raise it alone. After `fork()`, work in flight belongs to the parent, and is cancelled in the child."""

    def __init__(self, runner: EncoderRunner, max_length: int | None = None, max_tokens: int = MAX_TOKENS):
        """`max_length`: maximum number of tokens of a text; None for the encoder's own, at most MAX_LENGTH.
        `max_tokens`: those of a step."""
        encoder = runner.encoder
        self.encoder: Encoder | None = encoder
        """None after `close`."""
        self.hidden_size = encoder.hidden_size
        self.vocab_size = encoder.vocab_size
        self.num_types = encoder.num_types
        self.num_labels = encoder.num_labels
        self.instructions = {task: encoder.instructions[task] for task in runner.tasks}
        self.max_length = min(encoder.max_length, MAX_LENGTH) if max_length is None else max_length
        self.driver: StepDriver[TextQueue] = StepDriver(
            TextQueue(_Run(runner, max(max_tokens, self.max_length)), max_tokens, MAX_TEXTS),
            reload="EmbeddingModel(...)",
        )

    def submit(self, texts: Sequence[TextTokens], what: What) -> Future[Tensor]:
        job = Job(tuple(texts), what if isinstance(what, str) else tuple(what))
        width = self._check(job.what)
        check_texts(self, job.texts)
        if not job.texts:
            job.future.set_result(torch.empty(0, width))
            return job.future

        def refuse(error: BaseException) -> None:
            if isinstance(error, OfTheParent):
                job.future.cancel()
            else:
                job.fail(error)

        self.driver.post(lambda queue: queue.submit(job), refuse)
        return job.future

    def rows(self, texts: Sequence[TextTokens], pooling: Pooling) -> Tensor:
        return wait_for(self.submit(texts, pooling))

    def logits(self, texts: Sequence[TextTokens]) -> Tensor:
        return wait_for(self.submit(texts, LOGITS))

    def metrics(self) -> EncoderMetrics:
        """Counters of steps and tokens, and of what waits. Raises ValueError after `close`."""
        return self.driver.engine.metrics()

    def close(self) -> None:
        self.driver.close()
        self.encoder = None

    def _check(self, what: What) -> int:
        """Returns the columns of a result. Raises ValueError for one that this model does not have."""
        if what != LOGITS:
            if isinstance(what, str) or not what:
                raise ValueError(f"pooling must be a tuple of one or more names; got {what!r}")
            return self.hidden_size * len([check_pooling(name) for name in what])
        if not self.num_labels:
            raise ValueError(
                "this checkpoint has no classifier, so it has no logits; load one whose architecture ends in "
                "ForSequenceClassification"
            )
        return self.num_labels


class _Run:
    """Computes a step. It holds the memory of steps, and no reference to the driver."""

    def __init__(self, runner: EncoderRunner, max_tokens: int):
        self._runner = runner
        self._steps = TextSteps(runner.encoder, max_tokens, MAX_TEXTS, runner.tasks)

    def __call__(self, texts: list[TextTokens], what: What) -> Tensor:
        batch = self._steps.batch(texts)
        return self._runner.logits(batch) if what == LOGITS else self._runner.pooled(batch, what)
