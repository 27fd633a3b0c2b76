"""Masks of a step are filled while the model runs if it leaves a CPU free, and before it runs if it uses all CPUs."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

from pace import _C
from pace.llm.configs import SamplingConfig
from pace.llm.constraints import mask_filler
from pace.llm.constraints.masks import AllowedTokens
from tests.llm.constraints.masks import FunctionMask, random_allowed, with_mask
from tests.llm.fake_model import FakeModel
from tests.llm.generators import by_hand, check_idle
from tests.llm.speculation.drafters import make_generator
from tests.waiting import PATIENCE


class Waiting(AllowedTokens):
    """A mask whose `fill` waits until the model runs."""

    runs = threading.Event()
    count = 0

    def fill(self, row: torch.Tensor) -> None:
        assert threading.current_thread().name.startswith("pace-masks")
        assert self.runs.wait(PATIENCE)
        Waiting.count += 1
        super().fill(row)


def test_masks_are_filled_while_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: 1)
    generator = make_generator()
    generator.driver.engine.model.hook = lambda batch: Waiting.runs.set()
    tokens = generator.generate([1, 2], with_mask(SamplingConfig(), Waiting([5, 6]), 8)).generated_token_ids[0]
    assert set(tokens) <= {5, 6} and Waiting.count == 8


@pytest.mark.parametrize(
    "config, of_a_step",
    [(SamplingConfig(), ["apply_mask_", "argmax"]), (SamplingConfig(do_sample=True, seed=3, top_k=0), ["sample"])],
)
def test_a_step_masks_all_rows_at_once_and_picks_by_one_call(config: SamplingConfig, of_a_step: list[str]) -> None:
    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    ops, calls = generator.driver.engine.sampler.ops, []

    class Counted:
        def __getattr__(self, name: str):
            calls.append(name)
            return getattr(ops, name)

    generator.driver.engine.sampler.ops = Counted()
    masks = [None, AllowedTokens(range(7, 30)), FunctionMask(random_allowed(1), forces=False)] * 4
    with by_hand(generator) as hand:
        requests = [generator.add_request([1 + index], with_mask(config, mask, 5)) for index, mask in enumerate(masks)]
        while hand.step():
            pass
    assert all(request.done for request in requests)
    assert calls == of_a_step * 5
    calls.clear()
    with by_hand(generator) as hand:  # both prompts are there before the first step
        requests = [generator.add_request([index], SamplingConfig(max_new_tokens=5)) for index in (1, 2)]
        while hand.step():
            pass
    assert all(request.done for request in requests)
    assert calls == ["argmax"] * 5, "nothing of masks where there are none"


def test_masks_are_filled_on_all_cpus_before_a_model_that_takes_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each woken thread gets at least two masks."""
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: 0)
    monkeypatch.setattr(_C, "get_num_threads", lambda: 3)
    told: list[str] = []

    class Told(AllowedTokens):
        releases_gil = True

        def fill(self, row: torch.Tensor) -> None:
            told.append(threading.current_thread().name)
            super().fill(row)

        def fork(self) -> Told:
            return self

    generator = make_generator(model=FakeModel(eos_bias=-50.0))
    generator.driver.engine.model.hook = lambda batch: told.append("model")
    for num_rows, num_of_others in ((1, 0), (3, 0), (4, 2), (9, 6)):
        told.clear()
        with by_hand(generator) as hand:
            config = with_mask(SamplingConfig(), Told([5, 6]), 1)
            requests = [generator.add_request([row + 1], config) for row in range(num_rows)]
            while hand.step():
                pass
        assert all(request.done for request in requests)
        assert told.index("model") == num_rows, "all masks are filled when the model begins"
        assert sum(name.startswith("pace-masks") for name in told) == num_of_others


def test_an_error_of_the_model_waits_for_the_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the next step could use a mask that a thread is still filling."""
    monkeypatch.setattr(mask_filler, "num_spare_cpus", lambda: 1)
    generator, started, busy = make_generator(), threading.Event(), []

    class Slow(AllowedTokens):
        def fill(self, row: torch.Tensor) -> None:
            busy.append(1)
            started.set()
            threading.Event().wait(0.2)
            super().fill(row)
            busy.pop()

    def fail(batch: object) -> None:
        assert started.wait(PATIENCE)
        raise RuntimeError("the model's")

    generator.driver.engine.model.hook = fail
    with pytest.raises(RuntimeError, match="the model's"):
        generator.generate([1], with_mask(SamplingConfig(), Slow([3])))
    assert not busy
    generator.driver.engine.model.hook = lambda batch: None
    assert generator.generate([1], with_mask(SamplingConfig(), Slow([3]), 2)).generated_token_ids == [[3, 3]]
    check_idle(generator)


def test_a_forked_process_has_threads_of_its_own() -> None:
    generator = make_generator()
    config = with_mask(SamplingConfig(), AllowedTokens([3, 4]), 5)
    expected = generator.generate([1], config).generated_token_ids
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE))
        same = generator.generate([1], config).generated_token_ids == expected
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
