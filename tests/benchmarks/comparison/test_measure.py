"""`benchmarks/compare.py` runs pace and transformers on a small shape, and reports missing and failed peers."""

from __future__ import annotations

import io
import json
import sys
import time

import numpy as np
import pytest

from benchmarks import compare, page
from benchmarks.comparison import measure, report, worker
from benchmarks.comparison.checkpoint import shape_config
from benchmarks.comparison.gguf_writer import write_gguf
from benchmarks.comparison.measure import Comparison, LimitsError, Plan
from benchmarks.comparison.results import Results, Scenario, Subject
from pace.bench import limits
from pace.bench.shapes import SHAPES
from tests.benchmarks.comparison.test_runtimes import FAKE_LLAMA_BENCH
from tests.benchmarks.shapes import SMALL

SCENARIOS = [Scenario(20, 4), Scenario(8, 3, 2)]


class LocalWorker(worker.Worker):
    """A worker that answers in this process: a separate process takes seconds to import its runtime."""

    def __init__(self, runtime: str) -> None:
        self.server = worker.Server(runtime)

    def ask(self, operation, **arguments):
        answers = io.StringIO()
        worker.serve(io.StringIO(json.dumps({"do": operation, **arguments})), answers, self.server)
        answer = json.loads(answers.getvalue())
        if "error" in answer:
            raise worker.WorkerError(answer["error"])
        return answer

    def cpu_seconds(self):
        return time.process_time()

    def close(self):
        self.server = None


@pytest.fixture
def compare_small(quick_limits, monkeypatch, tmp_path, restore_isa_and_threads):
    """`compare_small(runtimes, dtypes)` returns the results of a small shape, and the messages. Workers are local,
    except those of `processes` and those with a separate interpreter."""
    monkeypatch.setitem(SHAPES, "small", SHAPES["llama-3.2-1b"] | SMALL)
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 0.0)

    def run(runtimes: list[str], dtypes: list[str], processes=(), **changes) -> tuple[Results, list[str]]:
        def start(runtime, python, *others):
            return worker.Worker(runtime, python, *others) if is_process(runtime, python) else LocalWorker(runtime)

        def is_process(runtime, python):
            return runtime in processes or python != sys.executable

        monkeypatch.setattr(measure, "Worker", start)
        results, said = Results("small", "", "", {}, {}, SCENARIOS, {}), []
        plan = Plan(["small"], runtimes, dtypes, SCENARIOS, ["bf16"], 2, 1, 2, None, None, tmp_path, 100.0)
        Comparison(Plan(**vars(plan) | {"say": said.append} | changes), results).run()
        return results, said

    return run


@pytest.mark.parametrize("in_processes", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_pace_and_transformers_in_turn(compare_small, in_processes):
    processes = ["pace", "transformers", worker.MACHINE] if in_processes else []
    results, _ = compare_small(["pace", "transformers"], ["fp32"], processes, other_dtypes=["fp32"])
    assert [subject.label for subject in results.subjects if subject.missing] == []
    main = [run for run in results.runs if run.scenario == SCENARIOS[0]]
    assert [(run.runtime, run.round) for run in main] == [
        ("pace", 0),
        ("transformers", 0),
        ("pace", 1),
        ("transformers", 1),
    ]
    assert all(
        min(run.prefill_s, run.step_s, run.read_gb_s, run.fma_gflops, run.step_bytes) > 0 for run in results.runs
    )
    others = [run for run in results.runs if run.scenario != SCENARIOS[0]]
    assert [(run.runtime, run.variant, run.round) for run in others] == [
        ("pace", "fp32", 0),
        ("transformers", "fp32", 0),
    ]
    pace, torch = results.subjects
    assert pace.same_argmax and 0 < pace.error < 1e-4 and torch.error == 0
    assert pace.peak_mib > 50 and pace.load_s > 0 and pace.settings["threads"] == "2"
    assert results.ratio(pace, torch, SCENARIOS[0], lambda run: run.decode_rate) > 0
    assert not report.disagreements(results)


def test_a_missing_peer_is_reported_and_the_others_go_on(compare_small, monkeypatch, tmp_path):
    (tmp_path / "ctranslate2.py").write_text("raise ImportError('no ctranslate2 for this test')\n")
    monkeypatch.syspath_prepend(tmp_path)
    results, said = compare_small(["pace", "ctranslate2"], ["fp32"])
    missing = next(s for s in results.subjects if s.runtime == "ctranslate2")
    assert missing.missing == "ImportError: no ctranslate2 for this test"
    assert "ctranslate2 is missing: ImportError: no ctranslate2 for this test" in said
    assert {run.runtime for run in results.runs} == {"pace"}
    assert {run.scenario for run in results.runs} == {SCENARIOS[0]}  # fp32 is none of `other_dtypes`
    assert any(
        "Not measured: ctranslate2 (small float32): ImportError: no ctranslate2" in line
        for line in report.notes(results)
    )


def test_an_interpreter_that_is_not_there_is_reported(compare_small):
    results, said = compare_small(["pace", "transformers"], ["bf16"], pythons={"transformers": "/no/such/python"})
    assert "No such file" in next(s for s in results.subjects if s.runtime == "transformers").missing
    assert {run.runtime for run in results.runs} == {"pace"}


def test_preparing_measures_nothing(compare_small, tmp_path):
    results, _ = compare_small(["pace"], ["bf16"], prepare_only=True)
    assert not results.runs and (tmp_path / "small" / "checkpoint" / "model.safetensors").exists()


def test_what_takes_too_long_is_left_out_and_said(compare_small):
    results, _ = compare_small(["pace"], ["bf16"], patience_s=0.0)
    assert {run.scenario for run in results.runs} == {SCENARIOS[0]}
    assert results.skipped[0].startswith("small, pace bf16, 2 x 8 + 3: a run would take about")


def test_no_runtime_is_blamed_for_limits_that_cannot_be_measured(compare_small, monkeypatch):
    ask = worker.Worker.ask

    def failing(self, operation, **arguments):
        if operation == "limits":
            self.process.kill()
        return ask(self, operation, **arguments)

    monkeypatch.setattr(worker.Worker, "ask", failing)
    with pytest.raises(LimitsError, match="cannot be measured: its process ended with code -9"):
        compare_small(["pace"], ["bf16"], [worker.MACHINE])


def test_a_round_with_unsteady_limits_is_measured_again(compare_small, monkeypatch):
    bandwidths = iter([10, 12, 20, 20, *[20, 20], *[30, 36] * 3])  # unsteady, then steady; steady; thrice unsteady
    monkeypatch.setattr(Comparison, "_limits", lambda self: limits.Limits("avx2", 2, float(next(bandwidths)), 100.0))
    results, said = compare_small(["pace"], ["bf16"])
    assert [run.read_gb_s for run in results.runs] == [20.0, 20.0, 33.0]
    assert (results.rounds, results.rounds_again, results.unsteady_rounds) == (3, 3, 1)
    assert sum("the limits changed by 20% in this round" in line for line in said) == 4
    assert any("Repeated measurements: 3. Rounds still unsteady: 1." in line for line in report.notes(results))


def test_a_program_runs_no_batches_and_is_asked_for_no_logits(compare_small, monkeypatch, tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text(FAKE_LLAMA_BENCH)
    program.chmod(0o755)
    monkeypatch.setenv("LLAMA_BENCH", str(program))
    pytest.importorskip("gguf", reason="the gguf package is not installed")

    def without_llama_cpp(runtime, variant, checkpoint, folder, *others):
        write_gguf(checkpoint, folder / "model.gguf", variant)
        return folder / "model.gguf"

    monkeypatch.setattr(measure, "ensure_conversion", without_llama_cpp)
    results, _ = compare_small(["pace", "ik_llama.cpp"], ["bf16"])
    runs = [run for run in results.runs if run.runtime == "ik_llama.cpp"]
    assert [run.scenario.batch for run in runs] == [1, 1] and runs[0].prefill_s == 0.5
    peer = next(subject for subject in results.subjects if subject.runtime == "ik_llama.cpp")
    assert (peer.missing, peer.load_s, peer.error) == (None, None, None) and peer.weight_bytes > 0


def test_a_shape_cut_to_its_first_layers():
    assert shape_config("qwen3-4b-4-layers") == SHAPES["qwen3-4b"] | {"num_hidden_layers": 4}
    assert shape_config("qwen3-4b") is SHAPES["qwen3-4b"]
    both = {"num_hidden_layers": 2, "num_experts": 16}
    assert shape_config("qwen3-30b-a3b-2-layers-16-experts") == SHAPES["qwen3-30b-a3b"] | both
    both = {"num_hidden_layers": 6, "num_experts": 64}
    assert shape_config("gemma-4-26b-a4b-6-layers-64-experts") == SHAPES["gemma-4-26b-a4b"] | both
    for name, has in (("deepseek-v2-lite-5-experts", "6 to 64"), ("qwen3-4b-8-experts", "no")):
        with pytest.raises(ValueError, match=f"{has} experts"):
            shape_config(name)
    for name, message in [("qwen4", "no shape"), ("qwen3-4b-0-layers", "1 to 36"), ("qwen3-4b-37-layers", "1 to 36")]:
        with pytest.raises(ValueError, match=message):
            shape_config(name)


def test_groups_hold_pace_and_what_memory_holds(monkeypatch, tmp_path):
    comparison = Comparison(
        Plan([], [], [], SCENARIOS, [], 1, 1, 2, None, None, tmp_path, 1.0), Results("", "", "", {}, {}, SCENARIOS, {})
    )
    subjects = [
        Subject("s", *names)
        for names in (("pace", "bf16", "bf16"), ("a", "bf16", "bf16"), ("b", "bf16", "bf16"), ("a", "q8", "int8"))
    ]
    monkeypatch.setattr(comparison, "_resident_bytes", lambda subject: 40.0)
    monkeypatch.setattr("benchmarks.comparison.measure.available_memory_bytes", lambda: 100.0)
    assert [[s.label for s in group] for _, group in comparison._groups(subjects)] == [
        ["pace bf16", "a bf16"],
        ["pace bf16", "b bf16"],
        ["pace bf16", "a q8"],
    ]
    monkeypatch.setattr("benchmarks.comparison.measure.available_memory_bytes", lambda: 1000.0)
    assert [[s.label for s in group] for _, group in comparison._groups(subjects)] == [
        ["pace bf16", "a bf16", "b bf16"],
        ["pace bf16", "a q8"],
    ]
    monkeypatch.setattr(
        "benchmarks.comparison.measure.available_memory_bytes", lambda: 1.0
    )  # one peer at a time, even after failures
    assert len(list(comparison._groups(subjects))) == 3


def test_who_is_held_to_an_instruction_set(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(
        "benchmarks.comparison.measure.Worker", lambda name, python, environment, log: given.update({name: environment})
    )
    plan = Plan([], [], [], SCENARIOS, [], 1, 1, 2, "avx2", "avx2", tmp_path, 1.0)
    for name in ("pace", worker.MACHINE, "transformers"):
        Comparison(plan, Results("", "", "", {}, {}, SCENARIOS, {}))._worker(name)
    assert given["pace"] == given[worker.MACHINE] == {"OMP_NUM_THREADS": "2", "PACE_ISA": "avx2"}
    assert given["transformers"]["ATEN_CPU_CAPABILITY"] == "avx2" and "PACE_ISA" not in given["transformers"]


def test_prompts_are_new_in_each_round_and_the_same_for_all(tmp_path):
    comparison = Comparison(
        Plan([], [], [], SCENARIOS, [], 1, 1, 2, None, None, tmp_path, 1.0), Results("", "", "", {}, {}, SCENARIOS, {})
    )
    comparison.vocab_size = 96
    first, second = (comparison._prompts(SCENARIOS[1], seed) for seed in (1, 2))
    assert first == comparison._prompts(SCENARIOS[1], 1) != second
    assert np.shape(first) == (2, 8) and np.max(first) < 96


def test_a_worker_answers_errors_and_goes_on():
    class Server:
        def fail(self):
            raise ValueError("not this")

        def add(self, a, b):
            return {"sum": a + b}

    answers = io.StringIO()
    worker.serve(io.StringIO('{"do": "fail"}\n{"do": "add", "a": 1, "b": 2}\n'), answers, Server())
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"error": "ValueError: not this"},
        {"sum": 3},
    ]


def test_a_worker_that_ends_is_an_error(tmp_path):
    with worker.Worker(worker.MACHINE, log=tmp_path / "log") as ended:
        ended.process.kill()
        with pytest.raises(worker.WorkerError, match="ended with code -9"):
            ended.ask("limits")


def test_a_worker_measures_the_limits(quick_limits):
    server = worker.Server(worker.MACHINE)
    told = server.machine(threads=1)
    assert told["threads"] == 1 and server.limits()["read_gb_s"] > 0


def test_options(capsys):
    options = compare.parse(["--quick", "--peers"])
    assert (options.repeats, options.prompt, options.batch, options.peers) == (2, 64, [2], [])
    assert compare.parse([]).peers is None and compare.parse([]).shapes == ["qwen2.5-0.5b", "llama-3.2-1b"]
    for wrong in (["--repeats", "0"], ["--peers", "nobody"], ["--python", "nobody=/bin/python"]):
        with pytest.raises(SystemExit):
            compare.parse(wrong)
    assert "--python wants PEER=PATH" in capsys.readouterr().err
    assert page.without_paths(["--python", "llama.cpp=/a/b", "--folder", "/c", "--isa", "avx2"]) == [
        "--python",
        "llama.cpp=PATH",
        "--folder",
        "PATH",
        "--isa",
        "avx2",
    ]
