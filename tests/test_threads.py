"""The thread pool as Python sees it: sizes, several callers, forks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pace import _C
from pace.ops import native


@pytest.fixture(autouse=True)
def restore_threads():
    before = _C.get_num_threads()
    yield
    _C.set_num_threads(before)


def test_the_number_of_threads_is_what_was_asked_for():
    for count in (1, 2, 5, 1):
        _C.set_num_threads(count)
        assert _C.get_num_threads() == count


@pytest.mark.parametrize("count", [0, -3, 5000])
def test_impossible_numbers_are_refused(count):
    with pytest.raises(ValueError, match=str(count)):
        _C.set_num_threads(count)


def test_callers_from_several_threads_get_their_own_results():
    _C.set_num_threads(2)
    inputs = [torch.randn(200, 64) for _ in range(4)]
    weight = torch.randn(64)
    expected = [native.rms_norm(x, weight, 1e-6) for x in inputs]

    def work(i: int) -> bool:
        return all(torch.equal(native.rms_norm(inputs[i], weight, 1e-6), expected[i]) for _ in range(100))

    with ThreadPoolExecutor(4) as callers:
        results = [callers.submit(work, i) for i in range(4)]
        for count in (1, 3, 2):  # resized while they run
            _C.set_num_threads(count)
        assert all(result.result() for result in results)


def test_a_forked_child_can_use_the_kernels():
    _C.set_num_threads(2)
    x, weight = torch.randn(200, 64), torch.ones(64)
    expected = native.rms_norm(x, weight, 1e-6)
    child = os.fork()
    if child == 0:
        same = torch.equal(native.rms_norm(x, weight, 1e-6), expected) and _C.get_num_threads() == 2
        os._exit(0 if same else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_flush_of_denormals_set_by_the_caller_does_not_change_results():
    tiny = torch.full((300, 64), 1e-42)
    weight = torch.full((64,), 2.0)
    expected = native.layer_norm(tiny, weight, None, 1e-12, tiny)[1]
    try:
        torch.set_flush_denormal(True)
        flushed = native.layer_norm(tiny, weight, None, 1e-12, tiny)[1]
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), expected.view(torch.int32)) and (expected > 0).all()
