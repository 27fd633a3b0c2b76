"""Errors around the engine's thread reach only the callers whose work failed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future

import pytest

from pace.assets import TINY
from pace.llm import CallbackStreamer, LLMModel, SamplingConfig
from pace.llm.clients.session import Session
from pace.llm.constraints import mask_filler
from pace.llm.constraints.masks import AllowedTokens, TokenMask
from pace.llm.engine.engine import Engine
from tests.llm.fake_model import FakeModel
from tests.llm.generators import check_idle, driver_of, make_generator
from tests.support import exit_code_in_fork
from tests.waiting import PATIENCE, Gate

LONG = SamplingConfig(max_new_tokens=300, ignore_eos=True)


class Panic(BaseException):
    """Like the error of a Rust library that panics, which is not an Exception."""


class AnyToken(TokenMask):
    """A mask that allows all tokens; subclasses override its methods."""

    def __init__(self) -> None:
        self.num_accepted = 0

    def fill(self, row) -> None:
        row.fill_(-1)

    def accept(self, token: int) -> None:
        self.num_accepted += 1

    def rollback(self, num_tokens: int) -> None:
        self.num_accepted -= num_tokens

    def count_allowed(self, tokens: list[int]) -> int:
        return len(tokens)


class PanicsInFill(AnyToken):
    def fill(self, row) -> None:
        if self.num_accepted == 3:
            raise Panic
        row.fill_(-1)


class PanicsInFork(AnyToken):
    def fork(self) -> TokenMask:
        raise Panic


class ForcesNoToken(AnyToken):
    def forced(self) -> list[int]:
        return [10**6] if self.num_accepted == 3 else []


class ForcesNoList(AnyToken):
    def forced(self) -> list[int]:
        return None if self.num_accepted == 3 else []


@pytest.mark.parametrize(
    "mask, error, beams",
    [(PanicsInFill, Panic, 1), (PanicsInFork, Panic, 1), (PanicsInFork, Panic, 2), (ForcesNoToken, ValueError, 1),
     (ForcesNoList, TypeError, 1)],
)  # fmt: skip
def test_a_mask_that_goes_wrong_fails_its_sequence_alone(mask, error, beams: int, caplog) -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    neighbour = generator.add_request([1, 2], LONG)
    with pytest.raises(error):
        generator.generate([3], SamplingConfig(token_mask=mask(), max_new_tokens=20, ignore_eos=True, num_beams=beams))
    assert neighbour.result(60).finish_reasons == ["length"]
    assert "a step failed" not in caplog.text
    check_idle(generator)


def test_a_panic_of_a_processor_fails_its_sequence_alone(caplog) -> None:
    def panics(ids, logits):
        raise Panic

    generator = make_generator(FakeModel(eos_bias=-50.0))
    neighbour = generator.add_request([1, 2], LONG)
    with pytest.raises(Panic):
        generator.generate([3], SamplingConfig(logits_processors=[panics]))
    assert neighbour.result(60).finish_reasons == ["length"]
    assert "a step failed" not in caplog.text


def test_masks_are_filled_where_executors_are_closed(monkeypatch) -> None:
    """A thread may still generate while the interpreter ends."""

    class Closed:
        def __init__(self, *arguments, **named) -> None:
            pass

        def submit(self, *arguments):
            raise RuntimeError("cannot schedule new futures after shutdown")

    config = SamplingConfig(token_mask=AllowedTokens([7, 9]), max_new_tokens=20, ignore_eos=True)
    expected = make_generator().generate([3], config).generated_token_ids
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: 1)
    monkeypatch.setattr(mask_filler, "ThreadPoolExecutor", Closed)
    assert make_generator().generate([3], config).generated_token_ids == expected


def test_forks_of_a_mask_are_made_where_no_other_is_at_work() -> None:
    at_work, together = threading.Lock(), []

    class Watched(AnyToken):
        def _watch(self) -> None:
            if not at_work.acquire(blocking=False):
                together.append(True)
                return
            time.sleep(0.0005)
            at_work.release()

        def fill(self, row) -> None:
            self._watch()
            row.fill_(-1)

        def accept(self, token: int) -> None:
            self._watch()

        def fork(self) -> Watched:
            self._watch()
            return Watched()

    generator = make_generator()
    config = SamplingConfig(token_mask=Watched(), max_new_tokens=5, ignore_eos=True)
    generator.generate([[number + 1] for number in range(40)], config)
    assert not together


def test_a_thread_that_does_not_start_is_told_and_tried_again(monkeypatch) -> None:
    generator, start = make_generator(), threading.Thread.start
    failures = [RuntimeError("can't start new thread"), KeyboardInterrupt()]

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "pace-engine" and failures:
            raise failures.pop(0)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        generator.generate([1])
    with pytest.raises(KeyboardInterrupt):
        generator.generate([1])
    assert generator.generate([1], SamplingConfig(max_new_tokens=3)).finish_reasons
    check_idle(generator)


def test_ctrl_c_while_a_session_is_made_leaves_nothing(monkeypatch) -> None:
    driver = driver_of(make_generator())
    driver.call(lambda engine: None).result(60)

    def interrupts(future: Future, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupts)
        with pytest.raises(KeyboardInterrupt):
            Session(driver)
    gc.collect()
    check_idle(driver)
    assert not driver.engine.scheduler.parked


def test_a_cancel_that_raises_ends_its_call_alone() -> None:
    class Gone:
        """An event of a multiprocessing manager whose process has died."""

        def is_set(self) -> bool:
            if threading.current_thread().name == "pace-engine":
                raise ConnectionError("the manager is gone")
            return False

    generator = make_generator(FakeModel(eos_bias=-50.0))
    neighbour = generator.add_request([1, 2], LONG)
    with pytest.raises(ConnectionError):
        generator.generate([3], LONG, cancel=Gone())
    assert neighbour.result(60).finish_reasons == ["length"]
    check_idle(generator)
    assert not driver_of(generator).engine.between_steps


def test_a_row_that_has_enough_does_not_fail_afterwards() -> None:
    """The engine is ahead of the streamer, which ends the row at an earlier token."""
    is_told = threading.Event()

    def fails(ids, logits):
        if ids.shape[1] == 8:
            is_told.set()
            raise ValueError("too far")
        return logits

    def enough(event) -> bool:
        return not is_told.wait(60)

    config = SamplingConfig(max_new_tokens=30, ignore_eos=True, logits_processors=[fails])
    out = make_generator(FakeModel(eos_bias=-50.0)).generate([1, 2], config, CallbackStreamer(enough))
    assert out.finish_reasons == ["cancelled"] and len(out.generated_token_ids[0]) == 1


@pytest.mark.parametrize("kind", ["a step", "a processor"])
def test_an_error_that_is_kept_does_not_keep_the_weights(kind: str) -> None:
    def fails(ids, logits):
        raise ValueError("of a processor")

    def fails_in_step(batch):
        raise ValueError("of a step")

    model = LLMModel(TINY, progress=False)
    weights, engine = weakref.ref(model._model), weakref.ref(model.generator.engine)
    if kind == "a step":
        model.generator.engine.model.forward = fails_in_step
    gc.collect()
    gc.disable()
    try:
        try:
            model.generate("Hi", SamplingConfig(logits_processors=[fails] if kind == "a processor" else None))
        except ValueError as error:
            kept = error
        model.close()
        assert engine() is None and weights() is None
        assert str(kept).startswith("of a")
    finally:
        gc.enable()


def test_a_model_that_its_own_processor_closes_goes_on() -> None:
    model = LLMModel(TINY, progress=False)

    def closes(ids, logits):
        model.close()

    with pytest.raises(ValueError, match="from within its own step"):
        model.generate("Hi", SamplingConfig(logits_processors=[closes]))
    assert model.generate("Hi", SamplingConfig(max_new_tokens=2)).texts
    model.close()


# -- fork --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["posted", "begun"])
def test_what_was_posted_before_a_fork_is_the_parents(where: str, monkeypatch) -> None:
    generator, config = make_generator(FakeModel(eos_bias=-50.0)), SamplingConfig(max_new_tokens=5, ignore_eos=True)
    gate = Gate()
    if where == "posted":
        driver_of(generator).call(gate)
        gate.wait_inside()
    else:
        submit = Engine.submit
        monkeypatch.setattr(Engine, "submit", lambda engine, sequences: (gate(), submit(engine, sequences)))
    request = generator.add_request([1, 2], config)
    gate.wait_inside()

    def is_cancelled() -> bool:
        gate.open()
        return request.result(PATIENCE).finish_reasons == ["cancelled"]

    assert exit_code_in_fork(is_cancelled) == 0
    gate.open()
    assert request.result(60).finish_reasons == ["length"]


def test_a_child_that_comes_back_into_generate_ends_it() -> None:
    """A child forked in a streamer returns into the loop that waits for tokens."""
    children = []

    def forks(event) -> bool:
        if not children:
            children.append(os.fork())
            if children == [0]:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(int(PATIENCE))
        return True

    generator, code = make_generator(FakeModel(eos_bias=-50.0)), 1
    try:
        out = generator.generate([1, 2], LONG, CallbackStreamer(forks))
        code = 0 if out.finish_reasons == ["cancelled"] else 1
    finally:
        if children == [0]:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 0
    assert out.finish_reasons == ["length"]
