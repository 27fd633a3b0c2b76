"""lm-eval's clients of completions and chat, beside its own `hf` model of the same directory, on tasks with data of
their own."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

MODEL, URL = os.environ["PACE_MODEL"], os.environ["PACE_URL"]
TASKS = Path(__file__).parent / "tasks"
TOLERANCE = 0.05
"""For sums of log-probabilities of bf16 weights: `hf` rounds activations to bf16 as well, pace does not."""

os.environ.setdefault("OPENAI_API_KEY", "none")


@cache
def results(kind: str, chat: bool = False, /, **arguments: str | int | bool) -> dict:
    with_tasks = ["pace_generation"] if chat else ["pace_choice", "pace_generation"]
    os.chdir(TASKS)  # files of data are named beside the tasks
    return simple_evaluate(
        model=kind, model_args=dict(arguments), tasks=with_tasks, batch_size=4, apply_chat_template=chat, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), log_samples=True,
    )  # fmt: skip


def of_hf(chat: bool = False) -> dict:
    return results("hf", chat, pretrained=MODEL, dtype="bfloat16", device="cpu")


def samples(found: dict, task: str) -> list[dict]:
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


CLIENTS = {
    "ids": {"tokenizer": MODEL, "tokenizer_backend": "huggingface"},
    "texts": {"tokenizer": MODEL, "tokenizer_backend": "huggingface", "tokenized_requests": False},
    "remote tokenizer": {"tokenizer_backend": "remote"},
    "many at once": {"tokenizer": MODEL, "tokenizer_backend": "huggingface", "num_concurrent": 8},
}


@pytest.mark.parametrize("name", CLIENTS)
def test_completions(name):
    found = results(
        "local-completions", model="tiny", base_url=f"{URL}/v1/completions", max_length=512, **CLIENTS[name]
    )
    expected = of_hf()
    for task in ("pace_choice", "pace_generation"):
        assert found["results"][task] == expected["results"][task]
    for ours, theirs in zip(samples(found, "pace_choice"), samples(expected, "pace_choice"), strict=True):
        for (value, is_greedy), (expected_value, expected_greedy) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            assert value == pytest.approx(expected_value, abs=TOLERANCE, rel=0.01)
            assert is_greedy == expected_greedy
        assert ours["acc"] == theirs["acc"]
    for ours, theirs in zip(samples(found, "pace_generation"), samples(expected, "pace_generation"), strict=True):
        assert ours["resps"] == theirs["resps"]


def test_chat():
    url = f"{URL}/v1/chat/completions"
    found, expected = results("local-chat-completions", True, model="tiny", base_url=url), of_hf(True)
    for ours, theirs in zip(samples(found, "pace_generation"), samples(expected, "pace_generation"), strict=True):
        assert ours["resps"] == theirs["resps"]
