"""The bundled model through the public interface, as a user runs it: native kernels, right answers, quiet, robust."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pace
from pace.assets import TINY
from pace.llm import CallbackStreamer, LLMModel, SamplingConfig
from tests.support import finish

PROMPTS = json.loads((TINY / "prompts.json").read_text(encoding="utf-8"))
STORY = [{"role": "user", "content": "Tell me a story about a little fox."}]
LONG = SamplingConfig(max_new_tokens=400)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def model(dtype):
    return LLMModel(TINY, dtype=dtype)


def encode(model, entry: dict) -> list[int]:
    """Token ids of an entry of prompts.json: a conversation or plain text."""
    if "messages" in entry:
        return model.tokenizer.apply_chat_template(
            entry["messages"], tools=entry.get("tools"), add_generation_prompt=True, return_dict=False
        )
    return model.tokenizer(entry["prompt"])["input_ids"]


def is_right(entry: dict, text: str, reason: str) -> bool:
    """True if the text satisfies the entry's rule: an equal text that stops, a given beginning, or contained words."""
    if entry["match"] == "exact":
        return text == entry["expected"] and reason == "stop"
    if entry["match"] == "prefix":
        return text.startswith(entry["expected"])
    return all(word in text for word in entry["contains"])


def wrong_answers(model, entries: list[dict]) -> list[tuple[dict, str]]:
    """Entries that greedy decoding of all `entries` in one ragged batch gets wrong, with its texts."""
    output = model.generate([encode(model, entry) for entry in entries], LONG)
    return [
        (entry, text)
        for entry, text, reason in zip(entries, output.texts, output.finish_reasons)
        if not is_right(entry, text, reason)
    ]


def test_greedy_answers_are_right(model):
    assert not wrong_answers(model, [entry for entry in PROMPTS if not entry.get("known_wrong")])


@pytest.mark.xfail(reason="the bundled model wants more training; pace/assets/README.md names the prompts")
def test_known_wrong_answers(model):
    assert not wrong_answers(model, [entry for entry in PROMPTS if entry.get("known_wrong")])


def test_a_wrong_answer_is_noticed():
    entry = {"match": "exact", "expected": "7 + 8 = 15"}
    assert is_right(entry, "7 + 8 = 15", "stop")
    assert not is_right(entry, "7 + 8 = 15", "length") and not is_right(entry, "7 + 8 = 16", "stop")
    assert not is_right({"match": "contains", "contains": ["fox", "day"]}, "a fox", "stop")


def test_alone_or_in_a_batch(model):
    rows = [encode(model, entry) for entry in PROMPTS[::9]]
    together = model.generate(rows, LONG)
    assert together.generated_token_ids == [model.generate(row, LONG).generated_token_ids[0] for row in rows]


def test_streams_hold_the_same_text(model):
    ids = encode(model, {"messages": STORY})
    expected = model.generate(ids, LONG).texts[0]
    assert "fox" in expected and len(expected.split()) > 40
    assert "".join(model.stream(ids, LONG)) == expected
    pieces = []
    model.generate(ids, LONG, CallbackStreamer(lambda event: pieces.append(event.text), model.tokenizer))
    assert "".join(pieces) == expected and len(pieces) > 40


def test_streamers_of_transformers_work_as_they_are(model, capsys):
    transformers = pytest.importorskip("transformers")
    ids = encode(model, {"messages": STORY})
    output = model.generate(
        ids, LONG, transformers.TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    assert capsys.readouterr().out == output.texts[0] + "\n"


def test_native_is_the_default_and_close_to_torch(model, dtype):
    """The kernels and plain torch sum in different orders, but give nearly the same logits on the same weights."""
    twin = LLMModel(TINY, dtype=dtype, backend="torch")
    ids = encode(model, {"messages": STORY})
    with model.session() as ours, twin.session() as theirs:
        a, b = ours.append(ids, logits="all"), theirs.append(ids, logits="all")
    assert not torch.equal(a, b)
    # If the CPU multiplies bf16, activations are rounded to 8 bits; 1e-4 is for fp32 sums of 256 terms in 5 layers.
    assert (a - b).abs().max() <= (0.05 if dtype == "bfloat16" else 1e-4) * b.abs().max()


def test_logits_are_the_same_bits_whatever_the_threads_and_chunks(dtype):
    results = []
    for num_threads, chunk in ((1, 1000), (2, 1000), (2, 1), (1, 7)):
        with LLMModel(TINY, dtype=dtype, num_threads=num_threads) as model, model.session() as session:
            ids = encode(model, {"messages": STORY}) * 3
            results.append(
                torch.cat([session.append(ids[i : i + chunk], logits="all") for i in range(0, len(ids), chunk)])
            )
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_score_prefers_the_truth(model):
    true, false = model.score(["The capital of Japan is Tokyo.", "The capital of Japan is Cairo."])
    assert true.sum() > false.sum() + 1


def test_quiet(capfd, recwarn):
    """Loading and generating writes nothing to stdout or stderr, and gives no warnings."""
    model = LLMModel(TINY)
    model.generate("Once upon a time", SamplingConfig(max_new_tokens=5))
    assert capfd.readouterr() == ("", "")
    assert not [str(warning.message) for warning in recwarn if "pace" in str(warning.filename)]


CHILD = """
import signal, sys, threading, os, time
from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
model = LLMModel(TINY)
expected = model.generate("1, 2, 3, 4,", SamplingConfig(max_new_tokens=8)).texts
for _ in range(3):
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            model.generate(["Once upon a time"] * 4, SamplingConfig(max_new_tokens=900, ignore_eos=True))
    except KeyboardInterrupt:
        print("stopped")
    model.generator.driver.call(lambda engine: engine.check_idle()).result()
    assert model.generate("1, 2, 3, 4,", SamplingConfig(max_new_tokens=8)).texts == expected
print("usable", flush=True)

begun = threading.Event()
def work():
    while True:
        for _ in model.stream("Once", SamplingConfig(max_new_tokens=500, ignore_eos=True)):
            begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(0.1)
"""


def child(*command: str, **more) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more
    )


def test_ctrl_c_leaves_the_model_usable_and_a_process_may_end_while_a_daemon_thread_generates():
    process = child("-c", CHILD)
    assert finish(process, timeout=120) == ("stopped\n" * 3 + "usable\n", "") and process.returncode == 0


@pytest.mark.alone
def test_start_up_is_quick(monkeypatch):
    """Import, load and the first token take less than 0.8 s of processor time in addition to importing torch and
    transformers. Wall time would be longer on a busy machine. Modules are compiled beforehand, like those of torch."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    program = (
        "import time, torch; from transformers import AutoTokenizer; begin = time.process_time(); "
        "from pace.llm import LLMModel, SamplingConfig; from pace.assets import TINY; LLMModel(TINY).generate('a', "
        "SamplingConfig(max_new_tokens=1)); print(time.process_time() - begin)"
    )
    beyond = []
    while (
        len(beyond) < 3 and min(beyond, default=1.0) >= 0.8
    ):  # other processes on the machine can make processor time longer too, but never shorter
        process = child("-c", program)
        out, err = finish(process)
        assert process.returncode == 0, err
        beyond.append(float(out))
    assert min(beyond) < 0.8, f"{beyond} s of processor time beyond the imports"
