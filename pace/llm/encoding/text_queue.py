"""`TextQueue`: texts that wait for an encoder, and the steps that compute them."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pace.llm.encoding.embedder import TextTokens, What

MAX_WAIT = 8
"""Steps that a text waits while shorter ones are computed. Later, the oldest come first."""


@dataclass(eq=False)
class Job:
    """Texts of one `submit`. Its future stays pending until the end, so that it can be cancelled."""

    texts: Sequence[TextTokens]
    what: What
    future: Future[Tensor] = field(default_factory=Future)
    rows: Tensor | None = None
    """`[N, P]`, filled as texts are computed."""
    num_done: int = 0

    def fill(self, indices: list[int], rows: Tensor) -> None:
        """Takes the rows of some of the texts. After the last ones, the future gets all."""
        if len(self.texts) == 1:
            self.rows = rows
        else:
            self.rows = torch.empty(len(self.texts), rows.shape[1]) if self.rows is None else self.rows
            self.rows[indices] = rows
        self.num_done += len(indices)
        if self.num_done == len(self.texts) and self.future.set_running_or_notify_cancel():
            self.future.set_result(self.rows)

    def fail(self, error: BaseException) -> None:
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(eq=False)
class Waiting:
    """A text of a job that waits for its step."""

    job: Job
    index: int
    since: int
    """Number of the step before which it came."""
    is_taken: bool = False

    @property
    def text(self) -> TextTokens:
        return self.job.texts[self.index]

    @property
    def is_gone(self) -> bool:
        """True if it need not be computed any more: it was, or its job has ended."""
        return self.is_taken or self.job.future.done()


@dataclass
class EncoderMetrics:
    """Counters since the model was loaded."""

    steps: int = 0
    tokens: int = 0
    """Tokens of the texts that were computed."""
    texts: int = 0
    failures: int = 0
    """Steps that raised an error."""
    waiting_texts: int = 0
    """Texts that wait now."""
    waiting_tokens: int = 0


class TextQueue:
    """Computes texts in steps: the shortest first, and none waits while more than MAX_WAIT steps pass before it that it
    could have been in. A plain object; one thread calls it (`StepDriver`)."""

    def __init__(self, run: Callable[[list[TextTokens], What], Tensor], max_tokens: int, max_texts: int):
        """`run` computes the rows `[S, P]` of texts. A step has at most `max_tokens`, unless it is one longer text, and
        at most `max_texts`."""
        self._run = run
        self._max_tokens = max_tokens
        self._max_texts = max_texts
        self._by_age: deque[Waiting] = deque()
        self._by_length: dict[What, list[tuple[int, int, Waiting]]] = {}
        """Heaps of length, number and text."""
        self._num_submitted = 0
        self._metrics = EncoderMetrics()
        self.failures: list[BaseException] = []

    def submit(self, job: Job) -> None:
        """Adds the texts of a job. It has at least one."""
        heap = self._by_length.setdefault(job.what, [])
        for index, text in enumerate(job.texts):
            waiting = Waiting(job, index, self._metrics.steps)
            self._by_age.append(waiting)
            heapq.heappush(heap, (len(text.tokens), self._num_submitted, waiting))
            self._num_submitted += 1
            self._metrics.waiting_texts += 1
            self._metrics.waiting_tokens += len(text.tokens)

    def step(self) -> bool:
        """Computes some texts; returns False if none wait."""
        self.failures.clear()
        taken = self._take()
        if taken:
            self._compute(taken)
        return bool(taken)

    def fail_all(self, error: BaseException) -> None:
        for waiting in self._by_age:
            waiting.job.fail(error)
        self._clear()

    def abandon(self) -> None:
        for waiting in self._by_age:
            waiting.job.future.cancel()
        self._clear()

    def metrics(self) -> EncoderMetrics:
        """A copy of the counters; any thread may call it."""
        return replace(self._metrics)

    # -- one step

    def _take(self) -> list[Waiting]:
        """Takes the texts of the next step, which all want the same as the oldest one."""
        taken: list[Waiting] = []
        oldest = self._oldest()
        if oldest is None:
            return taken
        what, num_tokens = oldest.job.what, 0
        while (waiting := self._next(what)) is not None and len(taken) < self._max_texts:
            num_tokens += len(waiting.text.tokens)
            if taken and num_tokens > self._max_tokens:
                break
            self._forget(waiting)
            taken.append(waiting)
        return taken

    def _next(self, what: What) -> Waiting | None:
        """The next text to compute: the oldest one if it has waited long, else the shortest."""
        oldest = self._oldest()
        if oldest is not None and oldest.job.what == what and self._metrics.steps - oldest.since >= MAX_WAIT:
            return oldest
        heap = self._by_length[what]
        while heap and heap[0][2].is_gone:
            self._forget(heapq.heappop(heap)[2])
        return heap[0][2] if heap else None

    def _oldest(self) -> Waiting | None:
        while self._by_age and self._by_age[0].is_gone:
            self._forget(self._by_age.popleft())
        return self._by_age[0] if self._by_age else None

    def _forget(self, waiting: Waiting) -> None:
        """Counts a text as no longer waiting."""
        if not waiting.is_taken:
            waiting.is_taken = True
            self._metrics.waiting_texts -= 1
            self._metrics.waiting_tokens -= len(waiting.text.tokens)

    def _compute(self, taken: list[Waiting]) -> None:
        """Computes texts, and gives their rows to their jobs. After an error, each is computed alone, so that an error
        only fails the jobs of its own texts."""
        self._metrics.steps += 1
        try:
            rows = self._run([waiting.text for waiting in taken], taken[0].job.what)
        except BaseException as error:
            self._metrics.failures += 1
            if len(taken) == 1:
                self.failures.append(error)
                taken[0].job.fail(error)
                return
            for waiting in taken:
                if not waiting.job.future.done():
                    self._compute([waiting])
            return
        self._metrics.texts += len(taken)
        self._metrics.tokens += sum(len(waiting.text.tokens) for waiting in taken)
        places: dict[Job, tuple[list[int], list[int]]] = {}
        for place, waiting in enumerate(taken):
            indices, of_job = places.setdefault(waiting.job, ([], []))
            indices.append(waiting.index)
            of_job.append(place)
        for job, (indices, of_job) in places.items():
            job.fill(indices, rows if len(places) == 1 else rows[of_job])

    def _clear(self) -> None:
        self._by_age.clear()
        self._by_length.clear()
        self._metrics.waiting_texts = self._metrics.waiting_tokens = 0
