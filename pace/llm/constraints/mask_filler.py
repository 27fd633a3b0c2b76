"""Fills the masks of a step's rows, while the model runs if it leaves a CPU free, otherwise before it."""

from __future__ import annotations

import math
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from types import TracebackType

import torch
from torch import Tensor

from pace import _C
from pace.llm.constraints.masks import SequenceMask
from pace.llm.sequence import Span

MOST_THREADS = 4
"""Maximum number of threads that fill masks: each mask needs the GIL for part of its time."""
JOBS_PER_THREAD = 2
"""Minimum number of jobs per thread: waking a thread takes about as long as filling a mask."""


def num_spare_cpus() -> int:
    """Number of CPUs that the model's kernels leave free."""
    return max(0, _num_cpus() - _C.get_num_threads())


@cache
def _num_cpus() -> int:
    """Number of CPUs that the process may keep busy."""
    cpu = _C.cpu_info()
    return min(cpu["logical_cpus"], math.ceil(cpu["quota_cpus"]) or cpu["logical_cpus"])


@dataclass(slots=True)
class Job:
    """The masks of one span's rows."""

    mask: SequenceMask
    drafts: list[int]
    first: int
    """Index of the first row, among the rows that have a mask."""
    num_rows: int
    num_filled: int = 0
    failure: BaseException | None = None

    def run(self, bits: Tensor) -> None:
        rows = bits[self.first : self.first + self.num_rows]
        self.num_filled, self.failure = self.mask.fill(rows, self.drafts)


def run_all(jobs: list[Job], bits: Tensor) -> None:
    for job in jobs:
        job.run(bits)


class PendingMasks:
    """Masks that are being filled. Must be used in a `with` block, which always waits for them: no other code may touch
    a mask in between."""

    def __init__(self, rows: list[int], bits: Tensor, jobs: list[Job], futures: list[Future[None]]) -> None:
        self.rows = rows
        """Rows of the step's logits that have a mask."""
        self.bits = bits
        """Allowed tokens, int32 `[len(rows), ceil(V / 32)]`; valid once `wait` has returned."""
        self._jobs = jobs
        self._futures = futures

    def __enter__(self) -> PendingMasks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wait(self._futures)

    def wait(self) -> dict[int, BaseException]:
        """Waits for the masks. Returns errors by row; the bits of such a row are undefined."""
        failures: dict[int, BaseException] = {}
        for future in self._futures:
            future.result()
        for job in self._jobs:
            for index in range(job.first + job.num_filled, job.first + job.num_rows):
                failures[self.rows[index]] = job.failure
        return failures


class NoMasks:
    """Masks of a step in which every token may follow."""

    rows: list[int] = []
    bits: Tensor | None = None

    def __enter__(self) -> NoMasks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait(self) -> dict[int, BaseException]:
        return {}


NO_MASKS = NoMasks()


class MaskFiller:
    """Fills the masks of one step at a time.

    If the kernels use all CPUs, another thread would take one from them, and all kernels would wait for the work on it.
    Then masks are filled before the model runs, on all CPUs.
    """

    def __init__(self, vocab_size: int) -> None:
        self._bits = torch.empty(0, -(-vocab_size // 32), dtype=torch.int32)
        self._executor: ThreadPoolExecutor | None = None
        self._process = 0

    def prepare(self, spans: list[Span]) -> PendingMasks | NoMasks:
        """Drops drafts that are not allowed from `span.drafts`. Starts or fills the masks of the rows from which a
        token may be picked."""
        masked = {
            id(span)
            for span in spans
            if span.sequence.mask is not None and span.start + span.num_tokens == len(span.sequence.tokens)
        }
        if not masked:
            return NO_MASKS
        row, rows, jobs = 0, [], []
        for span in spans:
            if id(span) in masked:
                mask, first = span.sequence.mask, len(rows)
                span.keep_drafts(mask.cut(span.sequence, span.drafts))
                row += span.num_rows
                rows += range(row - 1 - len(span.drafts) + span.num_certain, row)
                jobs.append(Job(mask, span.drafts, first, len(rows) - first))
            else:
                row += span.num_rows
        if len(self._bits) < len(rows):
            self._bits = torch.empty(len(rows), self._bits.shape[1], dtype=torch.int32)
        bits = self._bits[: len(rows)]
        num_spare = num_spare_cpus()
        shares = _shares(jobs, num_spare or _C.get_num_threads())
        own = [] if num_spare else shares.pop(0)
        futures = [self._start(share, bits) for share in shares]
        if own:
            run_all(own, bits)
            wait(futures)
        return PendingMasks(rows, bits, jobs, futures)

    def _start(self, jobs: list[Job], bits: Tensor) -> Future[None]:
        if self._executor is None or self._process != os.getpid():  # after a fork the threads are gone
            self._executor = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="pace-masks")
            self._process = os.getpid()
        try:
            return self._executor.submit(run_all, jobs, bits)
        except RuntimeError:  # the interpreter is shutting down and has closed all executors: run it here
            done: Future[None] = Future()
            run_all(jobs, bits)
            done.set_result(None)
            return done


def _shares(jobs: list[Job], num_cpus: int) -> list[list[Job]]:
    """Returns the jobs of each thread: one thread has all those that do not release the GIL."""
    alone = [job for job in jobs if not job.mask.releases_gil]
    spread = [job for job in jobs if job.mask.releases_gil]
    count = max(1, min(num_cpus, MOST_THREADS, len(spread) // JOBS_PER_THREAD))
    shares = [spread[index::count] for index in range(count)]
    shares[0] += alone
    return shares
