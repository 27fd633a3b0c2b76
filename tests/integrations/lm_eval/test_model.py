"""lm-eval's requests on pace, against transformers' model of the same directory, and against `generate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from pace.assets import TINY
from pace.integrations.lm_eval import PaceLM
from pace.llm import LLMModel, SamplingConfig

TASKS = Path(__file__).parents[2] / "conformance" / "checks" / "tasks"
CONTEXT = "Once upon a time there was a little girl"
PAIRS = [
    (CONTEXT, " who liked to play."), (CONTEXT, " named Lily."), ("", "The sun was hot."),
    ("The capital of France is ", "Paris."), (CONTEXT, "."), (CONTEXT, " named Lily."),
]  # fmt: skip


@pytest.fixture(scope="module")
def model():
    with LLMModel(TINY, dtype="float32", progress=False) as model:
        yield model


def instances(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


@pytest.fixture(scope="module")
def oracle():
    return get_model("hf")(pretrained=str(TINY), dtype="float32", device="cpu", batch_size=2)


def test_log_likelihoods_are_those_of_hf(model, oracle):
    requests = instances("loglikelihood", PAIRS)
    found = PaceLM(model).loglikelihood(requests, disable_tqdm=True)
    expected = oracle.loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=2e-3)
    assert found[1] == found[5] and found[0] != found[1]


def test_greedy_continuations_are_told(model):
    text = model.generate(CONTEXT, SamplingConfig(max_new_tokens=5, do_sample=False)).texts[0]
    requests = instances("loglikelihood", [(CONTEXT, text), (CONTEXT, text + " zebra")])
    assert [greedy for _, greedy in PaceLM(model).loglikelihood(requests)] == [True, False]


@pytest.mark.parametrize("length", [None, 12])
def test_whole_texts_are_those_of_hf(model, oracle, length, monkeypatch):
    texts = [(CONTEXT + " and she had a red ball. " * 3,), ("Hi.",)]
    requests = instances("loglikelihood_rolling", texts)
    monkeypatch.setattr(oracle, "_max_length", length)
    if length is None:
        monkeypatch.setattr(oracle, "_max_length", model.max_seq_len)
    found = PaceLM(model, max_length=length).loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(oracle.loglikelihood_rolling(requests, disable_tqdm=True), abs=5e-3)


@pytest.mark.parametrize("size", [1, "3", "auto"])
def test_the_batch_size_changes_nothing(model, size):
    requests = instances("loglikelihood", PAIRS)
    alone = PaceLM(model, batch_size=1).loglikelihood(requests)
    assert PaceLM(model, batch_size=size).loglikelihood(requests) == alone


def test_requests_of_one_context_compute_it_once(monkeypatch):
    with LLMModel(TINY, dtype="float32", progress=False) as model:
        engine, computed = model._engine.model, []
        forward = engine.forward
        monkeypatch.setattr(engine, "forward", lambda batch: computed.append(len(batch.tokens)) or forward(batch))
        context = (CONTEXT + " who liked to play with her friends in the park. ") * 8
        words = "red blue green black white big".split()
        lm = PaceLM(model)
        lm.loglikelihood(instances("loglikelihood", [(context, f" {word}") for word in words]))
        assert sum(computed) < len(lm.tok_encode(context)) + 20 * len(words)


def test_answers_are_those_of_generate(model):
    arguments = {"until": [".", "\n"], "max_gen_toks": 30, "do_sample": False, "temperature": 0.0}
    contexts = [CONTEXT, "The dog", "One day, Tom"]
    found = PaceLM(model).generate_until(instances("generate_until", [(each, arguments) for each in contexts]))
    config = SamplingConfig(max_new_tokens=30, do_sample=False, stop_strings=[".", "\n"])
    assert found == model.generate(contexts, config).texts


def test_a_long_context_loses_its_beginning(model):
    arguments = {"until": [], "max_gen_toks": 4}
    lm = PaceLM(model, max_length=16)
    found = lm.generate_until(instances("generate_until", [(CONTEXT * 3, arguments)]))
    prompt = lm.tok_encode(CONTEXT * 3)[-12:]
    assert found == model.generate([prompt], SamplingConfig(max_new_tokens=4, do_sample=False)).texts
    with pytest.raises(ValueError, match="answers of 16 tokens leave no room in the model's 16"):
        lm.generate_until(instances("generate_until", [("Hi", {"max_gen_toks": 16})]))


def test_thoughts_are_left_out(model):
    lm = PaceLM(model, think_end_token=" ")
    (text,) = lm.generate_until(instances("generate_until", [("The dog", {"until": [], "max_gen_toks": 8})]))
    assert " " not in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(pretrained=str(TINY), dtipe="float32"), "the model type pace has no dtipe"),
        (dict(pretrained=str(TINY), max_length=5000), "max_length must be from 2 to the model's 1024; got 5000"),
        (dict(pretrained=str(TINY), batch_size="many"), "batch_size must be a number of requests"),
        (dict(pretrained=str(TINY), batch_size=0), "batch_size must be a number of requests"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        PaceLM(**arguments)


def test_a_loaded_model_takes_no_options(model):
    with pytest.raises(ValueError, match="a loaded model has its own tokenizer and options"):
        PaceLM(model, quantization="int8")


def test_tasks_agree_with_hf(monkeypatch):
    monkeypatch.chdir(TASKS)  # the tasks name their data files relative to this folder
    tasks = TaskManager(include_path=str(TASKS), include_defaults=False)

    def samples(kind: str, chat: bool, **arguments):
        found = simple_evaluate(
            kind, dict(pretrained=str(TINY), dtype="float32", **arguments), ["pace_choice", "pace_generation"],
            batch_size=4, apply_chat_template=chat, bootstrap_iters=0, task_manager=tasks, log_samples=True,
        )  # fmt: skip
        return {task: sorted(each, key=lambda sample: sample["doc_id"]) for task, each in found["samples"].items()}

    for chat in (False, True):
        ours, theirs = samples("pace", chat), samples("hf", chat, device="cpu")
        for mine, other in zip(ours["pace_choice"], theirs["pace_choice"], strict=True):
            assert mine["acc"] == other["acc"]
            values, expected = (
                torch.tensor([value for value, _ in sample["filtered_resps"]]) for sample in (mine, other)
            )
            torch.testing.assert_close(values, expected, atol=5e-3, rtol=0)
        assert [each["resps"] for each in ours["pace_generation"]] == [
            each["resps"] for each in theirs["pace_generation"]
        ]


def test_the_command_line_knows_the_model_type(tmp_path):
    command = [sys.executable, "-m", "pace.integrations.lm_eval", "--model", "pace", "--model_args"]
    command += [f"pretrained={TINY},dtype=float32", "--tasks", "pace_choice", "--include_path", str(TASKS)]
    command += ["--output_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TASKS, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "pace_choice" in done.stdout and "acc" in done.stdout
