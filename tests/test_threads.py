"""The thread pool from Python: sizes, several callers, forks, pinning of threads, and placement of weights."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from pace import _C
from pace.assets import TINY
from pace.cli.environment import collect
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.options import use_threads
from pace.ops import native
from tests.support import exit_code_in_fork
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def restore_threads():
    before = _C.get_num_threads()
    yield
    _C.set_num_threads(before)


def work() -> None:
    native.rms_norm(torch.randn(500, 64), torch.ones(64), 1e-6)


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
    assert (
        exit_code_in_fork(lambda: torch.equal(native.rms_norm(x, weight, 1e-6), expected) and _C.get_num_threads() == 2)
        == 0
    )


def test_a_flush_of_denormals_set_by_the_caller_does_not_change_results():
    tiny = torch.full((300, 64), 1e-42)
    expected = tiny.clone()
    native.scale_(expected, 2.0)
    try:
        torch.set_flush_denormal(True)
        flushed = tiny.clone()
        native.scale_(flushed, 2.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed.view(torch.int32), expected.view(torch.int32)) and (expected > 0).all()


# -- sharing the machine: measured in processor time, which does not depend on what else runs
# -----------------------------


@pytest.mark.alone
def test_threads_without_work_sleep():
    """A spinning thread takes 0.5 s and a sleeping one none. The rest of this process takes less than 0.1 s."""
    _C.set_num_threads(2)
    work()
    before = time.process_time()
    time.sleep(0.5)
    spent = time.process_time() - before
    assert spent < 0.1, f"{spent:.2f} s of processor time in half a second"


@pytest.mark.alone
def test_a_step_on_more_threads_than_cpus_costs_little_more():
    """A waiting thread must leave its CPU to the thread it waits for, for example if processes share CPUs.

    With 16 threads on one CPU a step took 1.4 to 1.8 times the processor time of one thread. If waiting threads spin,
    it took 4 to 5 times that time."""
    program = """
import os, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from pace import _C
from pace.assets import TINY
from pace.llm import LLMModel

session = LLMModel(TINY).session()

def seconds_of_steps(threads):
    _C.set_num_threads(threads)
    session.append([7])  # starts the threads
    spent = time.process_time()
    for _ in range(50):
        session.append([7])
    return time.process_time() - spent

print(min(seconds_of_steps(16) / seconds_of_steps(1) for _ in range(3)))
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(result.stdout) < 2.5, f"{float(result.stdout):.1f} times the processor time of one thread"


# -- pinning -----------------------------------------------------------------------------------------------------------


def masks(num_workers: int) -> dict[str, list[list[int]]]:
    """CPU masks of all threads of this process, from the operating system: the pool's workers, and the others. Waits
    until there are `num_workers`, because the system lists a thread for a moment after it was joined."""
    wait_until(lambda: len(current_masks()["pace"]) == num_workers)
    return current_masks()


def current_masks() -> dict[str, list[list[int]]]:
    found: dict[str, list[list[int]]] = {"pace": [], "others": []}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # the thread ended after it was listed
            continue
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        cpus = [
            cpu
            for part in status["Cpus_allowed_list"].split(",")
            for cpu in range(int(part.split("-")[0]), int(part.split("-")[-1]) + 1)
        ]
        found["pace" if status["Name"].startswith("pace ") else "others"].append(cpus)
    return {kind: sorted(lists) for kind, lists in found.items()}


def test_pinned_workers_have_a_cpu_each_and_nobody_else_has():
    count = min(len(CPUS), 4)
    _C.set_num_threads(count, pinned=True)
    work()
    assert _C.pinned_cpus() == _C.cpus_to_pin(count) and len(set(_C.pinned_cpus())) == count
    found = masks(count - 1)
    assert found["pace"] == sorted([cpu] for cpu in _C.pinned_cpus()[1:])
    assert all(cpus == CPUS for cpus in found["others"])
    _C.set_num_threads(count)
    work()
    assert _C.pinned_cpus() == [] and masks(count - 1)["pace"] == [CPUS] * (count - 1)


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU")
def test_threads_that_others_start_later_are_not_pinned():
    """torch starts its threads from the thread that called the kernels, and child processes inherit its mask."""
    program = "\n".join(
        [
            "import json, os, subprocess, sys, torch",
            "from tests.test_threads import _C, masks, work",
            "_C.set_num_threads(2, pinned=True)",
            "work()",
            "torch.set_num_threads(2)",
            "torch.randn(600, 600) @ torch.randn(600, 600)",
            (
                "child = subprocess.run([sys.executable, '-c', 'import os; print(sorted(os.sched_getaffinity(0)))'], "
                "capture_output=True, text=True)"
            ),
            "print(json.dumps({**masks(1), 'child': json.loads(child.stdout)}))",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert len(found["pace"]) == 1 and len(found["pace"][0]) == 1
    assert len(found["others"]) >= 2 and all(cpus == CPUS for cpus in found["others"]) and found["child"] == CPUS


def test_the_mask_is_the_calling_threads_and_more_threads_than_it_holds_are_refused():
    too_many = len(CPUS) + 1
    with pytest.raises(
        ValueError, match=f"{too_many} threads cannot each have a CPU of their own: the affinity mask holds {len(CPUS)}"
    ):
        use_threads(too_many, True)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {CPUS[-1]})
        use_threads(1, True)
        work()
        assert _C.pinned_cpus() == [CPUS[-1]]
    finally:
        os.sched_setaffinity(0, before)


def test_pinning_is_asked_for_by_argument_or_variable(monkeypatch):
    monkeypatch.delenv("PACE_PIN_THREADS", raising=False)
    assert use_threads(1) == 1 and _C.pinned_cpus() == []
    assert collect()["threads"]["pinned_cpus"] is None
    monkeypatch.setenv("PACE_PIN_THREADS", "1")
    use_threads(1)
    assert len(_C.pinned_cpus()) == 1
    use_threads(1, False)  # an argument overrides the variable
    assert _C.pinned_cpus() == []
    told = collect()["threads"]
    assert told["pinned_cpus"] == _C.cpus_to_pin(told["default"])
    with pytest.raises(TypeError, match="pin_threads must be True, False or None; got int"):
        use_threads(1, 1)


def test_a_pinned_model_writes_the_same_text():
    config, texts = SamplingConfig(max_new_tokens=12), []
    for pin in (False, True, None):
        with LLMModel(TINY, pin_threads=pin) as model:
            texts.append(model.generate("Once upon a time", config).texts)
            assert len(_C.pinned_cpus()) == (_C.get_num_threads() if pin else 0)
    assert texts[0] == texts[1] == texts[2]
    assert sorted(os.sched_getaffinity(0)) == CPUS


# -- weights near their threads
# --------------------------------------------------------------------------------------------


def resident_share(address: int, num_bytes: int) -> float:
    """Returns the share of a buffer's whole pages that are in memory. The resident memory of the process would also
    change when other objects are freed."""
    page = mmap.PAGESIZE
    first, last = -(-address // page), (address + num_bytes) // page
    pages = (ctypes.c_ubyte * (last - first))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(first * page), ctypes.c_size_t((last - first) * page), pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return sum(entry & 1 for entry in pages) / len(pages)


@pytest.mark.parametrize("nodes", [1, 2])
def test_weights_are_placed_where_there_are_several_nodes(nodes, monkeypatch):
    info = _C.cpu_info() | {"numa_nodes": nodes}
    monkeypatch.setattr(_C, "cpu_info", lambda: info)
    _C.set_num_threads(2)
    matrix = torch.randn(2000, 4000)
    weight = native.empty_weight(2000, 4000, torch.float32)
    share = resident_share(weight.address, weight.nbytes)
    assert (share == 1) if nodes > 1 else (share < 0.1), f"{share:.0%} of the weight is in memory"
    native.pack_rows_(weight, matrix, 0)
    assert torch.equal(native.unpack(weight), matrix)
