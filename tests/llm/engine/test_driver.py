"""One thread owns the engine. Posting does not wait for a step, failures reach the callers whose work failed, and every
way of closing ends the thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref

import pytest

from pace.assets import TINY
from pace.llm import CallbackStreamer, LLMModel, SamplingConfig
from pace.llm.clients.session import Session
from pace.llm.engine.driver import MOST_FAILURES
from tests.llm.fake_model import FakeModel, greedy
from tests.llm.generators import by_hand, check_idle, driver_of, make_generator, num_at_work
from tests.support import exit_code_in_fork
from tests.waiting import PATIENCE, Gate, wait_until

ENDLESS = SamplingConfig(max_new_tokens=4000, ignore_eos=True)


def slow_generator(seconds: float = 0.002, **limits):
    """Returns a generator whose model sleeps `seconds` per step and never picks the end token."""
    generator = make_generator(FakeModel(eos_bias=-50.0), **limits)
    generator.engine.model.hook = lambda batch: time.sleep(seconds)
    return generator


# -- posting -----------------------------------------------------------------------------------------------------------


def test_posting_waits_for_no_step() -> None:
    generator, gate = make_generator(FakeModel(eos_bias=-50.0)), Gate()
    generator.engine.model.hook = gate
    request = generator.add_request([1], SamplingConfig(max_new_tokens=3))
    gate.wait_inside()  # and the step stays blocked
    others = [generator.add_request([2], SamplingConfig(max_new_tokens=3)) for _ in range(3)]
    others[0].cancel()
    answer = driver_of(generator).call(lambda engine: len(engine.scheduler.waiting))
    assert not answer.done() and not request.done
    gate.open()
    assert answer.result(60) == 2, "all was done in the order of posting, before the next step"
    assert [len(one.result(60).generated_token_ids[0]) for one in (request, *others)] == [3, 0, 3, 3]
    check_idle(generator)


def test_requests_advance_without_anyone_waiting() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    request = generator.add_request([1, 2], SamplingConfig(max_new_tokens=30))
    wait_until(lambda: request.done)
    assert request.tokens == greedy(generator.engine.model, [1, 2], 30)


def test_an_idle_engine_uses_no_cpu() -> None:
    generator = make_generator()
    generator.generate([1, 2], SamplingConfig(max_new_tokens=5))
    session = Session(driver_of(generator))
    session.append([1])
    clock = time.pthread_getcpuclockid(driver_of(generator)._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    seconds = time.clock_gettime(clock) - before
    assert seconds < 0.005, f"{seconds:.3f} s of half a second; a thread that looks for work takes most of it"


def test_what_a_call_raises_is_its_futures_alone() -> None:
    generator = make_generator()
    driver = driver_of(generator)
    with pytest.raises(ZeroDivisionError):
        driver.call(lambda engine: 1 // 0).result(60)
    assert driver.call(lambda engine: engine.max_length).result(60) == generator.engine.max_length


def test_a_model_called_by_its_own_processor_says_so() -> None:
    generator = make_generator()
    expected = generator.generate([1, 2]).generated_token_ids
    waiting = generator.add_request([9], SamplingConfig(max_new_tokens=1))
    waiting.result(60)
    for call in (
        lambda: generator.generate([3, 4]),
        lambda: next(generator.stream([3])),
        lambda: driver_of(generator).call(lambda engine: None),
        lambda: driver_of(generator).close(),
    ):
        config = SamplingConfig(logits_processors=[lambda ids, logits, call=call: call() and logits])
        with pytest.raises(ValueError, match="within its own step"):
            generator.generate([1, 2], config)
    check_idle(generator)
    assert generator.generate([1, 2]).generated_token_ids == expected


def test_work_dropped_in_a_cycle_is_ended_by_the_collector_wherever_it_strikes() -> None:
    """Also if the collector runs within a step, on the engine's own thread."""
    model = FakeModel(eos_bias=-50.0)
    generator = make_generator(model)
    config = SamplingConfig(max_new_tokens=8)
    expected = generator.generate([1, 2], config).generated_token_ids
    with by_hand(generator):
        cycle = [generator.add_request([5] * 40, ENDLESS), generator.stream([6], ENDLESS)]
        cycle.append(cycle)
        del cycle
        model.hook = lambda batch: gc.collect()
    assert generator.generate([1, 2], config).generated_token_ids == expected
    check_idle(generator)


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_failed_step_is_told_to_those_whose_work_it_was(caplog) -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=2)
    with by_hand(generator):
        requests = [generator.add_request([token], SamplingConfig(max_new_tokens=6)) for token in (1, 2, 3)]
        calls = []

        def hook(batch) -> None:
            calls.append(batch)
            if len(calls) == 3:
                raise RuntimeError("out of order")

        generator.engine.model.hook = hook
    for request in requests[:2]:
        with pytest.raises(RuntimeError, match="out of order"):
            request.result(60)
        assert len(request.tokens) == 2 and request.finish_reason == "error"
    assert requests[2].result(60).generated_token_ids == [greedy(generator.engine.model, [3], 6)]
    assert "out of order" in caplog.text
    check_idle(generator)


def test_three_failures_in_a_row_end_the_engine_and_everyone_hears_why() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0), max_sequences_per_step=1)
    with by_hand(generator):
        requests = [generator.add_request([1], ENDLESS) for _ in range(MOST_FAILURES + 2)]

        def hook(batch) -> None:
            raise MemoryError("no room at all")

        generator.engine.model.hook = hook
    for request in requests[:MOST_FAILURES]:
        with pytest.raises(MemoryError, match="no room at all"):
            request.result(60)
    for request in requests[MOST_FAILURES:]:
        with pytest.raises(RuntimeError, match=r"ended after 3 failed steps in a row.*no room at all"):
            request.result(60)
    with pytest.raises(RuntimeError, match="load the model again") as info:
        generator.generate([1])
    assert isinstance(info.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError, match="load the model again"):
        generator.add_request([1])
    driver_of(generator).close()


def test_failures_between_steps_that_succeed_are_no_reason_to_end() -> None:
    generator = make_generator(FakeModel(eos_bias=-50.0))
    for _ in range(MOST_FAILURES + 2):
        generator.engine.model.hook = lambda batch: 1 // 0
        with pytest.raises(ZeroDivisionError):
            generator.generate([1], SamplingConfig(max_new_tokens=2))
        generator.engine.model.hook = lambda batch: None
        generator.generate([1], SamplingConfig(max_new_tokens=2))
    check_idle(generator)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_callback_that_raises_ends_its_call_alone(rows: int) -> None:
    generator = slow_generator()
    other = generator.add_request([9], SamplingConfig(max_new_tokens=40))

    def callback(event) -> None:
        raise KeyError("the callback's own")

    with pytest.raises(KeyError, match="the callback's own"):
        generator.generate([[1]] * rows, ENDLESS, CallbackStreamer(callback))
    assert len(other.result(60).generated_token_ids[0]) == 40
    check_idle(generator)


def test_ctrl_c_ends_the_call_it_strikes_and_no_other() -> None:
    generator, armed = slow_generator(), threading.Event()

    def hook(batch) -> None:
        """Sends SIGINT once the armed call's sequences are running."""
        time.sleep(0.002)
        if armed.is_set() and len(batch.spans.kv_len) > 1:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)

    generator.engine.model.hook = hook
    other = generator.add_request([9], SamplingConfig(max_new_tokens=200))
    for call in (
        lambda: generator.generate([[1], [2]], ENDLESS),
        lambda: list(generator.stream([1], ENDLESS)),
        lambda: generator.generate([3], ENDLESS, CallbackStreamer(lambda event: None)),
    ):
        with pytest.raises(KeyboardInterrupt):
            armed.set()
            call()
    request = generator.add_request([4], SamplingConfig(max_new_tokens=60))
    with pytest.raises(KeyboardInterrupt):
        armed.set()
        request.result()
    assert len(request.result(60).generated_token_ids[0]) == 60, "a request goes on, and may be asked again"
    assert other.result(60).generated_token_ids == [greedy(generator.engine.model, [9], 200)]
    check_idle(generator)


# -- closing -----------------------------------------------------------------------------------------------------------


def test_close_from_another_thread_ends_what_is_in_flight() -> None:
    model = LLMModel(TINY, progress=False)
    request, session = model.add_request("1, 2, 3,", ENDLESS), model.session()
    errors: list[BaseException] = []

    def work(call) -> None:
        try:
            call()
        except ValueError as error:
            errors.append(error)

    calls = [
        lambda: model.generate(["Once", "upon", "a time"], ENDLESS),
        lambda: list(model.stream("Once", ENDLESS)),
        lambda: model.generate("Once", SamplingConfig(num_beams=2, max_new_tokens=900, ignore_eos=True)),
        lambda: model.score(["word " * 900] * 20),
    ]
    threads = [threading.Thread(target=work, args=(call,)) for call in calls]
    forward = model.generator.engine.model.forward
    model.generator.engine.model.forward = lambda batch: (time.sleep(0.05), forward(batch))[1]
    for thread in threads:
        thread.start()
    wait_until(lambda: num_at_work(model) > 5)
    model.close()
    model.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(errors) == len(calls)
    for call in (request.result, lambda: session.append([1]), lambda: model.generate("a"), lambda: list(request)):
        with pytest.raises(ValueError, match="this model is closed"):
            call()
    session.close()
    request.cancel()


def test_what_nobody_uses_any_more_is_freed_at_once_and_its_thread_ends() -> None:
    gc.collect()
    gc.disable()
    try:
        generator = make_generator()
        generator.generate([1, 2])
        check_idle(generator)
        engine, thread = weakref.ref(generator.engine), generator.driver._thread
        del generator
        assert engine() is None
        thread.join(60)
        assert not thread.is_alive()
    finally:
        gc.enable()


def test_a_model_dropped_at_work_is_freed_when_the_work_ends() -> None:
    generator = slow_generator()
    request, engine = generator.add_request([1], SamplingConfig(max_new_tokens=20)), weakref.ref(generator.engine)
    thread = generator.driver._thread
    del generator
    assert len(request.result(60).generated_token_ids[0]) == 20
    del request
    thread.join(60)
    gc.collect()
    assert not thread.is_alive() and engine() is None


def test_a_child_forked_during_a_step_can_generate() -> None:
    model, gate = FakeModel(), Gate()
    generator = make_generator(model)
    expected = generator.generate([1, 2]).generated_token_ids
    model.hook = gate
    parents = generator.add_request([1, 2])
    gate.wait_inside()

    def generates() -> bool:
        model.hook = lambda batch: None
        model._busy = threading.Lock()  # the thread that held it does not exist in the child
        if generator.generate([1, 2]).generated_token_ids != expected:
            return False
        check_idle(generator)
        return parents.result(PATIENCE).finish_reasons == ["cancelled"]

    exit_code = exit_code_in_fork(generates)
    gate.open()
    assert exit_code == 0
    assert parents.result(60).generated_token_ids == expected, "the parent's goes on"
    assert generator.generate([1, 2]).generated_token_ids == expected


def test_a_session_lives_on_in_a_forked_child() -> None:
    with LLMModel(TINY, progress=False) as model, model.session() as session:
        session.append([5, 6, 7])
        with model.session() as other:
            expected = other.append([5, 6, 7, 8])

        def appends() -> bool:
            return bool((session.append([8]) == expected).all())

        assert exit_code_in_fork(appends) == 0
        assert appends()
