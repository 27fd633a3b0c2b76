"""The single thread that owns an engine. Other threads post work to it and never wait for a step to do so.

    submit(sequences)   queues a client's sequences; their sinks are notified of tokens and of the end.
    abort(sequences)    removes them, as "cancelled".
    call(function)      runs it between two steps; returns a Future of its result.

`StepDriver` does this for anything that works in steps, `EngineDriver` for an engine.

The thread starts with the first post. With nothing to do it sleeps and holds no reference to the driver. So an unused
model is freed at once, and its thread ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from pace.llm.engine.engine import Engine
from pace.llm.engine.tracebacks import forget_engine_frames
from pace.llm.engine.turns import NO_TURNS
from pace.llm.sequence import Sequence

logger = logging.getLogger("pace")

MOST_FAILURES = 3
"""Failed steps in a row after which the engine is given up. Each failed with different sequences, so no single sequence
is the cause."""


class Steps(Protocol):
    """Work that is done in steps, by one thread."""

    failures: list[BaseException]
    """The errors of the last step that clients have received."""

    def step(self) -> bool:
        """Does a step of the work; returns False if there is none. An error that it raises has failed the clients of
        the step."""

    def fail_all(self, error: BaseException) -> None:
        """Ends all work with an error."""

    def abandon(self) -> None:
        """Ends all work in a child after `fork()`, as cancelled."""


T = TypeVar("T")
S = TypeVar("S", bound=Steps)
Work = Callable[[Any], None]
Refusal = Callable[[BaseException], None]


class OfTheParent(RuntimeError):
    """Error in a child process for work that was posted before `fork()`; the parent does this work."""

    def __init__(self) -> None:
        super().__init__("this was begun before fork(), and goes on in the parent process")


class StepDriver(Generic[S]):
    """Steps an engine on its own thread while there is work. Any thread may post, and so may a finaliser.

    A step that raises fails the sequences it worked on (`Engine.step`); others continue. After MOST_FAILURES in a
    row, or `close`, everything in flight fails with the reason, and posting raises it. After `fork()`, work in flight
    belongs to the parent: in the child it ends as "cancelled". The child starts its own thread with the next post.
    """

    def __init__(self, engine: S, reload: str = "LLMModel(...)") -> None:
        """`reload`: how a closed model is loaded again, for errors."""
        self._engine: S | None = engine
        self._reload = reload
        self._why_ended: Callable[[], Exception] | None = None
        self._is_forked = False
        self._is_exiting = False
        self._inbox: deque[tuple[Work, Refusal]] = deque()
        self._current: tuple[Work, Refusal] | None = None
        self.stepping_since: float | None = None
        """Start of the current step, on the clock of `time.perf_counter`; None between steps."""
        self.turns = NO_TURNS
        """Held for posted work and one step; a `StepTurns` if other engines of the process have theirs. To be set
        before the first post."""
        self._num_failures = 0
        """Consecutive failed steps."""
        self._of_the_parent: list[tuple[Work, Refusal]] = []
        """In a child after `fork()`: work posted before the fork."""
        self._make_locks()
        _drivers.add(self)

    # -- calls of clients ----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> S:
        """The engine, for reading; only `call` may change it. Raises the error that ended the driver."""
        engine, why_ended = self._engine, self._why_ended
        if engine is None:
            assert why_ended is not None
            raise why_ended()
        return engine

    def tidy(self, work: Work) -> None:
        """Runs `work(engine)` before the next step, unless the driver ends. Never raises and never waits, so a
        finaliser may call it at any moment."""
        with self._lock:
            if self._why_ended is None:
                self._inbox.append((work, lambda error: None))
        _release(self._wake)

    def call(self, function: Callable[[S], T]) -> Future[T]:
        """Runs `function(engine)` between two steps. The future gets its result or its exception. Raises as `post`
        does."""
        future: Future[T] = Future()

        self.post(lambda engine: future.set_result(function(engine)), future.set_exception)
        return future

    def post(self, work: Work, refuse: Refusal) -> None:
        """Runs `work(engine)` between two steps, or `refuse(error)` if it raises or the driver ends first. Raises
        ValueError on the driver's own thread (in a logits processor, say), which must not wait for a step. Raises the
        error that ended the driver, if it has ended."""
        self.check_outside()
        with self._lock:
            if self._why_ended is not None:
                raise self._why_ended()
            self._inbox.append((work, refuse))
            thread = self._new_thread()
        if thread is not None:
            self._start(thread)
        _release(self._wake)

    def start(self) -> None:
        """Starts the thread so that existing work continues. After `fork()` it otherwise starts only with the next
        post."""
        if self._thread is None:
            self.post(lambda engine: None, lambda error: None)

    def check_outside(self) -> None:
        """Raises ValueError on the driver's own thread."""
        if threading.current_thread() is self._thread:
            raise ValueError(
                "the model cannot be called from within its own step, for example by a logits processor; call it after "
                "generate has returned"
            )

    def close(self) -> None:
        """Ends the thread after the current step and drops the engine. Work in flight fails with a ValueError, which
        posting raises from then on. Closing twice is harmless."""
        reload = self._reload
        self._end(lambda: ValueError(f"this model is closed; load it again with {reload}"))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _make_locks(self) -> None:
        self._lock = threading.RLock()  # a finaliser may post while its own thread holds it
        self._wake = threading.Lock()  # held while there is nothing new to do
        self._wake.acquire()
        self._thread: threading.Thread | None = None

    def _new_thread(self) -> threading.Thread | None:
        """Returns a new thread to start, or None if there is one. The caller holds the lock."""
        if self._thread is not None:
            return None
        wake = self._wake
        reference = weakref.ref(self, lambda _: _release(wake))
        self._thread = threading.Thread(target=_drive, args=(wake, reference), name="pace-engine", daemon=True)
        return self._thread

    def _start(self, thread: threading.Thread) -> None:
        """Starts the thread without holding the lock, which a finaliser on the new thread may need. If it does not
        start (no more threads, or Ctrl-C), posted work is refused and the next post tries again."""
        try:
            thread.start()
        except BaseException as error:
            with self._lock:
                if thread.ident is not None:  # it runs: only the wait for its start was interrupted
                    raise
                self._thread = None
                refused = list(self._inbox)
                self._inbox.clear()
            why = error if isinstance(error, Exception) else RuntimeError("the engine's thread did not start")
            for _, refuse in refused:
                _quietly(refuse, why)
            raise

    def _owns(self, thread: threading.Thread) -> bool:
        with self._lock:
            return self._thread is thread

    def _work(self) -> bool:
        """Runs posted work and steps until there is nothing left to do. Returns False if the driver has ended."""
        if self._is_forked:
            self._is_forked = False
            self._leave_to_parent()
        while True:
            with self.turns:
                self._do_posted()
                if self._why_ended is not None:
                    self._finish()
                    return False
                has_stepped = self._step()
            if not has_stepped and not self._inbox:
                return True

    def _step(self) -> bool:
        """Steps the engine. Returns False if there was nothing to do."""
        try:
            self.stepping_since = time.perf_counter()
            has_stepped = self.engine.step()
            self.stepping_since = None
            for error in self.engine.failures:
                forget_engine_frames(error)
            if has_stepped:
                self._num_failures = 0
            return has_stepped
        except BaseException as error:
            self.stepping_since = None
            self._num_failures += 1
            logger.warning("a step failed, and so did the sequences in it: %r", error)
            forget_engine_frames(error)
            if self._num_failures == MOST_FAILURES:
                self._give_up(error)
            return True

    def _do_posted(self) -> None:
        while self._inbox and self._why_ended is None:
            self._current = work, refuse = self._inbox[0]
            self._inbox.popleft()
            try:
                work(self.engine)
            except BaseException as error:
                forget_engine_frames(error)
                _quietly(refuse, error)
            self._current = None

    def _leave_to_parent(self) -> None:
        """Ends work that was in flight or posted before `fork()`, in the child."""
        posted = dict.fromkeys([self._current, *self._of_the_parent] if self._current else self._of_the_parent)
        self._current, self._of_the_parent = None, []
        for _, refuse in posted:
            _quietly(refuse, OfTheParent())
        self.engine.abandon()

    def _give_up(self, cause: BaseException) -> None:
        def reason() -> Exception:
            error = RuntimeError(
                f"the engine has ended after {MOST_FAILURES} failed steps in a row; load the model again. The last "
                f"error was {cause!r}"
            )
            error.__cause__ = cause
            return error

        with self._lock:
            self._why_ended = self._why_ended or reason

    def _finish(self) -> None:
        """Fails everything in flight. Holds the lock, so work posted meanwhile is failed here or refused when it is
        posted."""
        with self._lock:
            why_ended = self._why_ended
            if self._is_exiting or self._engine is None or why_ended is None:
                return
            _quietly(self._engine.fail_all, why_ended())
            while self._inbox:
                _quietly(self._inbox.popleft()[1], why_ended())
            self._engine = None

    def _end(self, reason: Callable[[], Exception]) -> None:
        self.check_outside()
        with self._lock:
            self._why_ended = self._why_ended or reason
            thread = self._thread
        if thread is not None:
            _release(self._wake)
            _join(thread)
        else:
            self._finish()

    def _exit(self) -> None:
        """Ends the driver before the interpreter shuts down. A thread that returned from C++ afterwards would abort the
        process."""
        self._is_exiting = True  # threads still waiting are daemons and end with the interpreter
        self._end(lambda: RuntimeError("the interpreter is exiting"))

    def _after_fork_in_child(self) -> None:
        """Prepares the driver in the child, where only the forking thread is left. The new driver thread cleans up the
        engine."""
        if self._thread is not None:
            self._is_forked = True
            self._of_the_parent += self._inbox
            self._inbox.clear()
        self._make_locks()


class EngineDriver(StepDriver[Engine]):
    """Steps an engine for sequences."""

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences. Raises as `post` does."""
        sequences = list(sequences)

        def refuse(error: BaseException) -> None:
            for sequence in sequences:
                if isinstance(error, OfTheParent):
                    sequence.finish_reason = "cancelled"
                else:
                    sequence.fail(error)
                assert sequence.finish_reason is not None
                sequence.sink.end(sequence, sequence.finish_reason, sequence.error)

        self.post(lambda engine: engine.submit(sequences), refuse)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Removes sequences before the next step. Unfinished ones end as "cancelled". Harmless for finished ones and
        after the driver has ended. A finaliser may call it at any moment."""
        sequences = list(sequences)
        self.tidy(lambda engine: engine.abort(sequences))


def _drive(wake: Any, reference: weakref.ref[StepDriver]) -> None:
    while True:
        wake.acquire()
        driver = reference()
        if driver is not None and not driver._owns(threading.current_thread()):
            _release(wake)  # wakes the owner: this thread was replaced before it had started
            return
        if driver is None or not driver._work():
            return
        del driver


def _quietly(function: Callable[[Any], object], argument: Any) -> None:
    """Calls `function` and logs what it raises, so that the other callers are still notified."""
    try:
        function(argument)
    except BaseException as error:
        logger.warning("error while reporting a failure to another caller: %r", error)


def _release(lock: Any) -> None:
    try:
        lock.release()
    except RuntimeError:  # already released: the waiting thread is about to wake
        pass


def _join(thread: threading.Thread) -> None:
    """Waits for the current step, ignoring Ctrl-C: each step is bounded."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue


_drivers: weakref.WeakSet[StepDriver] = weakref.WeakSet()


@atexit.register
def _exit_all() -> None:
    for driver in list(_drivers):
        driver._exit()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
