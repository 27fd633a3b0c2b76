"""A closed or dropped model frees its memory at once, without waiting for the garbage collector. An interpreter that
exits does not wait for running requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.llm.forked import Ended, run_each

SCRIPT = """
import gc, json, os, sys, time, weakref
gc.disable()

from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig, SamplingConfig
from pace.memory import resident_bytes

way, arguments = sys.argv[1], eval(sys.argv[2])
GREEDY = SamplingConfig(max_new_tokens=8, ignore_eos=True)


def use(model):
    model.generate(["Once upon a time", "One, two,"], GREEDY)
    model.generate("Once upon a time", GREEDY.copy().merge_from(SamplingConfig(num_beams=2)))
    "".join(model.stream("Once upon a time", GREEDY))
    model.add_request("Once upon a time", GREEDY).result()
    model.score("Once upon a time")
    with model.session() as session:
        session.append([5, 6, 7])
    model.operator_report()


def watch(model):
    engine = model._engine
    parts = dict(model=model._model, engine=engine, runner=engine.model, cache=engine.cache, pool=engine.cache.pool,
                 drafter=engine.drafter)
    return {name: weakref.ref(part) for name, part in parts.items()}


model = LLMModel(TINY, dtype="float32", num_threads=1, progress=False, **arguments)
gc.collect()  # what importing and reading files left behind is not the model's
weights, parts = sum(model.memory_report().weights.values()), watch(model)
if way == "with":
    with model:
        use(model)
        before = resident_bytes()
else:
    if way != "close unused":
        use(model)
    before = resident_bytes()
    if way == "rebind":
        model = None
    else:
        model.close()
def found():
    alive = [name for name, part in parts.items() if part() is not None]
    return dict(weights=weights, freed=before - resident_bytes(), alive=alive)


# Without close, what a session's end posts may still be under way on the engine's thread, which holds the model then.
# It gives back one weight after another, when the model's weak reference has long gone.
deadline = time.monotonic() + 60
while way == "rebind" and time.monotonic() < deadline:
    now = found()
    if not now["alive"] and now["freed"] > 0.9 * weights:
        break
    time.sleep(0.001)
print(json.dumps(found()), flush=True)
os._exit(0)
"""

WAYS = ["close", "with", "rebind", "close unused"]
ARGUMENTS = [
    "dict(backend='torch')",  # the C library frees its weights
    "dict(backend='native-eager', quantization='int4')",
    "dict(backend='attention=torch')",
    "dict(spec_config=DraftModelConfig(str(TINY_DRAFT)))",
    "dict(spec_config=PromptLookupConfig())",
    "dict(kv_cache_type='bmc', kv_cache_dtype='int8')",
]
WITH_WORK_IN_FLIGHT = """
import threading, time
from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
model = LLMModel(TINY, progress=False)
endless = SamplingConfig(max_new_tokens=900, ignore_eos=True)
requests = [model.add_request("Once upon a time", endless) for _ in range(3)]
stream = model.stream("1, 2, 3,", endless)
next(stream)
time.sleep(0.05)
"""
ENDINGS = [
    "",
    "raise SystemExit(0)",
    "model.close()",
    # Python 3.12 warns that a child of a process with threads may hang.
    "import os, warnings; warnings.simplefilter('ignore')\n"
    "pid = os.fork(); os._exit(0) if pid == 0 else os.waitpid(pid, 0)",
    "model = None",
    "threading.Thread(target=model.generate, args=('Once', endless), daemon=True).start(); time.sleep(0.1)",
]


def closing(way: str, arguments: str) -> str:
    return f"import sys; sys.argv[1:] = {[way, arguments]!r}\n{SCRIPT}"


def found(done: Ended) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.alone
def test_a_model_that_went_holds_no_memory(subtests) -> None:
    for way, done in zip(WAYS, run_each([closing(way, "{}") for way in WAYS]), strict=True):
        with subtests.test(way):
            kept = found(done)
            assert kept["alive"] == [], "parts of the model are still there"
            assert kept["weights"] > 15 << 20
            assert kept["freed"] > 0.9 * kept["weights"], f"{kept} bytes: resident memory kept the weights"


@pytest.fixture(scope="module")
def runs() -> list[Ended]:
    """Returns the results of the programs of the two tests below, in order."""
    programs = [closing("close", arguments) for arguments in ARGUMENTS]
    return run_each(programs + [WITH_WORK_IN_FLIGHT + ending for ending in ENDINGS])


def test_no_part_of_a_model_that_went_is_left(runs, subtests) -> None:
    """The weights are freed too, but the C library may keep their memory."""
    for arguments, done in zip(ARGUMENTS, runs[: len(ARGUMENTS)], strict=True):
        with subtests.test(arguments=arguments):
            assert found(done)["alive"] == []


def test_the_interpreter_exits_cleanly_with_work_in_flight(runs, subtests) -> None:
    for ending, done in zip(ENDINGS, runs[len(ARGUMENTS) :], strict=True):
        with subtests.test(ending=ending):
            assert (done.code, done.err) == (0, "")
