"""The runtimes of `benchmarks/compare.py`: what programs, engines and steps are asked for, and how they are timed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.comparison.runtimes import RUNTIMES, vllm_runtime
from benchmarks.comparison.runtimes.amd_pace_runtime import ROOT, AmdPace
from benchmarks.comparison.runtimes.base import SteppedRuntime, Timing
from benchmarks.comparison.runtimes.ik_llama_cpp_runtime import IkLlamaCpp

FAKE_LLAMA_BENCH = """#!/usr/bin/env python3
import json, sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if words["-m"].endswith("missing.gguf"):
    sys.exit("cannot open the file")
prompt, generated = map(int, words["-gp"].split(","))
speed = 2 if words["-rtr"] == "1" and words["-fa"] == "0" else 1
about = {"build_commit": "abc", "build_number": 7}
print(json.dumps([
    about | {"n_prompt": prompt, "n_gen": 0, "avg_ns": 1000000000 // speed},
    about | {"n_prompt": prompt, "n_gen": generated, "avg_ns": 500000000 * generated // speed},
]))
"""


def test_a_peer_that_is_a_program(monkeypatch, tmp_path):
    program = tmp_path / "llama-bench"
    with pytest.raises(ImportError, match="--llama-bench PATH"):
        IkLlamaCpp.import_modules()
    monkeypatch.setenv("LLAMA_BENCH", str(program))
    with pytest.raises(ImportError, match="llama-bench is not a program"):
        IkLlamaCpp.import_modules()
    program.write_text(FAKE_LLAMA_BENCH)
    program.chmod(0o755)
    IkLlamaCpp.import_modules()
    runtime = IkLlamaCpp(tmp_path / "model.gguf", "Q4_K_M", 2)
    runtime.tune([[1] * 20])
    assert runtime.settings() == {"repack": "1", "flash attention": "0", "build": "abc (7)"}
    refusals = {variant.name: IkLlamaCpp.refusal(variant.name) for variant in IkLlamaCpp.variants}
    assert [name for name, reason in refusals.items() if reason] == ["Q2_0"]
    assert runtime.run([[1] * 20], 4) == Timing(0.5, 0.25) and runtime.peak_mib() > 1
    with pytest.raises(RuntimeError, match="ended with code 1: cannot open the file"):
        IkLlamaCpp(tmp_path / "missing.gguf", "Q4_K_M", 2).run([[1]], 1)


FAKE_BATCHED_BENCH = """#!/usr/bin/env python3
import sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("what nobody reads")
print("main: n_kv_max = " + words["-c"] + "\\n", file=sys.stderr)
prompt, generated, batch = (words[name] for name in ("-npp", "-ntg", "-npl"))
seconds = 1 if sys.argv[-1] == "-rtr" and words["-fa"] == "1" else 2
print("|    PP |  TG |  B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |", file=sys.stderr)
print("|-------|-----|----|------|--------|----------|--------|----------|-----|-------|", file=sys.stderr)
print(f"| {prompt} | {generated} | {batch} | {words['-c']} | {seconds} | 9 | {seconds} | 9 | 9 | 9 |", file=sys.stderr)
"""


def test_batches_of_a_program_have_a_program_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMA_BENCH", str(tmp_path / "llama-bench"))
    assert not IkLlamaCpp.takes_batches()
    program = tmp_path / "llama-batched-bench"
    program.write_text(FAKE_BATCHED_BENCH)
    program.chmod(0o755)
    assert IkLlamaCpp.takes_batches()
    runtime = IkLlamaCpp(tmp_path / "model.gguf", "Q4_K_M", 2)
    runtime.tune([[1] * 20] * 8)
    assert runtime.settings()["repack"] == runtime.settings()["flash attention"] == "1"
    assert runtime.run([[1] * 20] * 8, 4) == Timing(1.0, 0.25)


def test_steps_are_timed_one_by_one(monkeypatch):
    clock = iter([0.0, 10.0, *(t for step in (9.0, 8.0, 1.0, 3.0, 2.0) for t in (100.0, 100.0 + step))])
    monkeypatch.setattr("benchmarks.comparison.runtimes.base.time.perf_counter", lambda: next(clock))

    class Fake(SteppedRuntime):
        calls: list = []

        def __init__(self):
            pass

        def reserve(self, batch, length):
            self.calls.append((batch, length))

        def start(self, prompts):
            self.calls.append(prompts)

        def step(self):
            self.calls.append("step")

        def logits(self, prompt):
            raise NotImplementedError

    assert Fake().run([[1, 2], [3, 4]], 5) == Timing(10.0, 2.0)  # the median without the first two steps
    assert Fake.calls == [(2, 8), [[1, 2], [3, 4]], *["step"] * 5]


class FakeEngine:
    """vLLM's engine: a step takes one waiting prompt, and adds a token to each sequence that was read before."""

    def __init__(self, arguments: SimpleNamespace) -> None:
        self.arguments = arguments
        self.waiting: dict[str, Any] = {}
        self.running: dict[str, Any] = {}

    from_engine_args = classmethod(lambda cls, arguments: cls(arguments))

    def add_request(self, name, prompt, params):
        self.waiting[name] = (prompt["prompt_token_ids"], params)

    def abort_request(self, names):
        for name in names:
            self.waiting.pop(name, None), self.running.pop(name, None)

    def step(self):
        outputs = [self.output(name) for name in self.running]
        for name in list(self.waiting)[:1]:
            self.running[name] = self.waiting.pop(name)
            outputs.append(self.output(name))
        return outputs

    def output(self, name):
        ids, params = self.running[name]
        logits = {token: SimpleNamespace(logprob=float(token)) for token in (2, 0, 1)}
        answer = SimpleNamespace(token_ids=[7], logprobs=[logits] if hasattr(params, "logprobs") else None)
        return SimpleNamespace(request_id=name, outputs=[answer])


def test_the_engine_of_vllm(monkeypatch, tmp_path, restore_isa_and_threads):
    parts = {name: lambda **given: SimpleNamespace(**given) for name in ("EngineArgs", "SamplingParams")}
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLMEngine=FakeEngine, **parts))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 131072}')
    runtime = vllm_runtime.Vllm(tmp_path, "bfloat16", 2)
    engine = runtime.engine
    assert engine.arguments.max_model_len == 1 << 15 and not engine.arguments.enable_prefix_caching
    runtime.reserve(3, 10)
    runtime.start([[1, 2], [3, 4], [5, 6]])
    assert len(engine.running) == 3  # each has a first token
    assert all(p.max_tokens == 10 and p.ignore_eos and p.temperature == 0 for _, p in engine.running.values())
    assert runtime.logits([1, 2]).tolist() == [0.0, 1.0, 2.0] and len(engine.running) == 1
    assert runtime.run([[8, 9]], 3).step_s > 0


def test_our_own_package_is_not_taken_for_that_of_amd(monkeypatch):
    path = list(sys.path)
    with pytest.raises(ImportError, match="amd-pace"):
        AmdPace.import_modules()
    assert sys.path == path
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.3.0")
    monkeypatch.setattr(AmdPace, "modules", ())
    monkeypatch.setattr(sys, "path", [str(ROOT), "/elsewhere", str(ROOT / "tests" / "..")])
    monkeypatch.setenv("PACE_LOG_LEVEL", "")
    monkeypatch.setenv("PACE_PREFIX_CACHE", "")
    AmdPace.import_modules()
    assert sys.path == ["/elsewhere"]


def test_every_runtime_says_what_it_has():
    for name, runtime in RUNTIMES.items():
        assert runtime.name == name and runtime.modules and (runtime.packages or runtime.is_program)
        assert {variant.dtype for variant in runtime.variants} <= set(compare.DTYPES) and len(
            {v.name for v in runtime.variants}
        ) == len(runtime.variants)
