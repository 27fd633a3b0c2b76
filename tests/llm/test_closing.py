"""A model that goes gives its memory back at once, not when the garbage collector happens to run."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import gc, json, sys, time, weakref
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
def alive():
    return [name for name, part in parts.items() if part() is not None]


# Without close, what a session's end posts may still be under way on the engine's thread, which holds the model then.
deadline = time.monotonic() + 10
while way == "rebind" and alive() and time.monotonic() < deadline:
    time.sleep(0.001)
print(json.dumps(dict(weights=weights, freed=before - resident_bytes(), alive=alive())))
"""

WAYS = ["close", "with", "rebind", "close unused"]


def closed(way: str, arguments: str = "{}") -> dict:
    command = [sys.executable, "-c", SCRIPT, way, arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_given_back_at_once(way: str) -> None:
    found = closed(way)
    assert found["alive"] == [] and found["weights"] > 15 << 20
    assert found["freed"] > 0.9 * found["weights"]


@pytest.mark.parametrize(
    "arguments",
    [
        "dict(backend='torch')",  # whose weights are the C library's to give back
        "dict(backend='native-eager', quantization='int4')",
        "dict(backend='attention=torch')",
        "dict(spec_config=DraftModelConfig(str(TINY_DRAFT)))",
        "dict(spec_config=PromptLookupConfig())",
        "dict(kv_cache_type='bmc', kv_cache_dtype='int8')",
    ],
)
def test_nothing_holds_a_model_that_went(arguments: str) -> None:
    assert closed("close", arguments)["alive"] == []
