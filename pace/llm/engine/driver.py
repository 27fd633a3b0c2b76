"""The one thread that owns an engine. Everyone else posts work to it, and waits for no step to do so.

    submit(sequences)   a client's sequences, queued        their sinks hear of tokens, and of the end
    abort(sequences)    taken out, as "cancelled"
    call(function)      run between two steps               a Future of what it returns

The thread starts with the first post. With nothing to do it sleeps, and then holds no reference to the driver: a model
that nobody uses any more is freed at once, and its thread ends.
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
from typing import Any, TypeVar

from pace.llm.engine.engine import Engine
from pace.llm.engine.tracebacks import forget_engine_frames
from pace.llm.sequence import Sequence

logger = logging.getLogger("pace")

MOST_FAILURES = 3
"""Failed steps in a row after which the engine is given up: each had other sequences, so it is not one of these."""

T = TypeVar("T")
Work = Callable[[Engine], None]
Refusal = Callable[[BaseException], None]


class OfTheParent(RuntimeError):
    """Why work that was posted before `fork()` is not done in the child: the parent does it."""

    def __init__(self) -> None:
        super().__init__("this was begun before fork(), and goes on in the parent process")


class EngineDriver:
    """Steps an engine on a thread of its own while there is work. Any thread may post, and so may a finaliser.

    A step that raises fails the sequences it worked on (`Engine.step`), and the others go on. After MOST_FAILURES in a
    row, or `close`, everything in flight fails with the reason, and posting raises it. In a child after `fork()` what
    was in flight is the parent's: there it ends as "cancelled", and a thread of the child's own starts with the next
    post.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        self._why_ended: Callable[[], Exception] | None = None
        self._is_forked = False
        self._is_exiting = False
        self._inbox: deque[tuple[Work, Refusal]] = deque()
        self._current: tuple[Work, Refusal] | None = None
        self.stepping_since: float | None = None
        """When the step under way began, on the clock of `time.perf_counter`; None between steps."""
        self._of_the_parent: list[tuple[Work, Refusal]] = []
        """In a child after `fork()`: what was posted before."""
        self._make_locks()
        _drivers.add(self)

    # -- what clients do -----------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, to look at; only `call` may change anything of it. Raises what ended the driver."""
        engine = self._engine
        if engine is None:
            raise self._why_ended()
        return engine

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queues sequences. Raises ValueError on the driver's own thread (in a logits processor, say), where nobody may
        wait for them, and what ended the driver."""
        sequences = list(sequences)

        def refuse(error: BaseException) -> None:
            for sequence in sequences:
                if isinstance(error, OfTheParent):
                    sequence.finish_reason = "cancelled"
                else:
                    sequence.fail(error)
                sequence.sink.end(sequence, sequence.finish_reason, sequence.error)

        self.post(lambda engine: engine.submit(sequences), refuse)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Has sequences taken out before the next step; those not finished finish as "cancelled". Harmless for finished
        ones and where the driver has ended. A finaliser may call it at any moment."""
        sequences = list(sequences)
        self.tidy(lambda engine: engine.abort(sequences))

    def tidy(self, work: Work) -> None:
        """Has `work(engine)` run before the next step, unless the driver ends. Never raises, and waits for nothing: a
        finaliser may call it at any moment."""
        with self._lock:
            if self._why_ended is None:
                self._inbox.append((work, lambda error: None))
        _release(self._wake)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Has `function(engine)` run between two steps; what it returns or raises is the future's. Raises as `submit`
        does."""
        future: Future[T] = Future()

        self.post(lambda engine: future.set_result(function(engine)), future.set_exception)
        return future

    def post(self, work: Work, refuse: Refusal) -> None:
        """Has `work(engine)` run between two steps, or `refuse(error)` where it raises or the driver ends before.
        Raises as `submit` does."""
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
        """Lets work that is there go on: after `fork()` nothing does until someone posts, or waits."""
        if self._thread is None:
            self.post(lambda engine: None, lambda error: None)

    def check_outside(self) -> None:
        """Raises ValueError on the driver's own thread."""
        if threading.current_thread() is self._thread:
            raise ValueError(
                "the model was called from within its own step (by a logits processor, say), where it cannot run; "
                "call it after generate"
            )

    def close(self) -> None:
        """Ends the thread after the step under way, and drops the engine. What is in flight fails with a ValueError,
        which posting raises from then on. Closing twice is harmless."""
        self._end(lambda: ValueError("this model is closed; load it again with LLMModel(...)"))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _make_locks(self) -> None:
        self._lock = threading.RLock()  # a finaliser may post while its own thread holds it
        self._wake = threading.Lock()  # held while there is nothing new to look at
        self._wake.acquire()
        self._thread: threading.Thread | None = None

    def _new_thread(self) -> threading.Thread | None:
        """The thread, where it is to be started; with the lock held."""
        if self._thread is not None:
            return None
        wake = self._wake
        reference = weakref.ref(self, lambda _: _release(wake))
        self._thread = threading.Thread(target=_drive, args=(wake, reference), name="pace-engine", daemon=True)
        return self._thread

    def _start(self, thread: threading.Thread) -> None:
        """Without the lock, which a finaliser on the new thread may want. Where it does not start (the system has no
        more threads, or Ctrl-C), what was posted is refused, and the next post tries again."""
        try:
            thread.start()
        except BaseException as error:
            with self._lock:
                if thread.ident is not None:  # it runs: only the wait for it was broken off
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
        """Does what was posted and steps, until there is nothing left to do. False where the driver has ended."""
        if self._is_forked:
            self._is_forked = False
            self._leave_to_parent()
        num_failures = 0
        while True:
            self._do_posted()
            if self._why_ended is not None:
                self._finish()
                return False
            try:
                self.stepping_since = time.perf_counter()
                has_stepped = self._engine.step()
                self.stepping_since = None
                for error in self._engine.failures:
                    forget_engine_frames(error)
                if not has_stepped:
                    if not self._inbox:
                        return True
                    continue
                num_failures = 0
            except BaseException as error:
                self.stepping_since = None
                num_failures += 1
                logger.warning("a step failed, and with it what it worked on: %r", error)
                forget_engine_frames(error)
                if num_failures == MOST_FAILURES:
                    self._give_up(error)

    def _do_posted(self) -> None:
        while self._inbox and self._why_ended is None:
            self._current = work, refuse = self._inbox[0]
            self._inbox.popleft()
            try:
                work(self._engine)
            except BaseException as error:
                forget_engine_frames(error)
                _quietly(refuse, error)
            self._current = None

    def _leave_to_parent(self) -> None:
        """In a child after `fork()`: ends what was in flight, and what was posted before."""
        posted = dict.fromkeys([self._current, *self._of_the_parent] if self._current else self._of_the_parent)
        self._current, self._of_the_parent = None, []
        for _, refuse in posted:
            _quietly(refuse, OfTheParent())
        self._engine.abandon()

    def _give_up(self, cause: BaseException) -> None:
        def reason() -> Exception:
            error = RuntimeError(
                f"the engine has ended after {MOST_FAILURES} failed steps in a row; load the model again. The last one: "
                f"{cause!r}"
            )
            error.__cause__ = cause
            return error

        with self._lock:
            self._why_ended = self._why_ended or reason

    def _finish(self) -> None:
        """Fails what is in flight, with the lock held: whoever posts meanwhile is in time to be told, or raises."""
        with self._lock:
            if self._is_exiting or self._engine is None:
                return
            _quietly(self._engine.fail_all, self._why_ended())
            while self._inbox:
                _quietly(self._inbox.popleft()[1], self._why_ended())
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
        """Before the interpreter goes: a thread that came back from C++ to one that is gone would abort the process."""
        self._is_exiting = True  # whoever still waits is a daemon thread, and goes with the interpreter
        self._end(lambda: RuntimeError("the interpreter is exiting"))

    def _after_fork_in_child(self) -> None:
        """Only the thread that forked lives on. The engine is put in order by the thread that will own it."""
        if self._thread is not None:
            self._is_forked = True
            self._of_the_parent += self._inbox
            self._inbox.clear()
        self._make_locks()


def _drive(wake: Any, reference: weakref.ref[EngineDriver]) -> None:
    while True:
        wake.acquire()
        driver = reference()
        if driver is not None and not driver._owns(threading.current_thread()):
            _release(wake)  # for the one that does: this one was given up before it had started
            return
        if driver is None or not driver._work():
            return
        del driver


def _quietly(function: Callable[[Any], object], argument: Any) -> None:
    """What it raises is logged: who else waits must hear, too."""
    try:
        function(argument)
    except BaseException as error:
        logger.warning("while others were told why their work is not done: %r", error)


def _release(lock: Any) -> None:
    try:
        lock.release()
    except RuntimeError:  # it is released: whoever waits for it is on its way
        pass


def _join(thread: threading.Thread) -> None:
    """Waits for the step under way, whatever signals come: each step is bounded."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            continue


_drivers: weakref.WeakSet[EngineDriver] = weakref.WeakSet()


@atexit.register
def _exit_all() -> None:
    for driver in list(_drivers):
        driver._exit()


def _after_fork_in_child() -> None:
    for driver in list(_drivers):
        driver._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
