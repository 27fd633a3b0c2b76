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
TOLERANCE = 0.15
"""For sums of log-probabilities: the server's weights are bf16, those of `hf` fp32, as its logits in bf16 are far
coarser than pace's."""

os.environ.setdefault("OPENAI_API_KEY", "none")


@cache
def results(kind: str, chat: bool = False, /, **arguments: str | int | bool) -> dict:
    with_tasks = ["pace_generation"] if chat else ["pace_choice", "pace_generation"]
    os.chdir(TASKS)  # files of data are named beside the tasks
    return simple_evaluate(
        model=kind, model_args=dict(arguments), tasks=with_tasks, batch_size=4, apply_chat_template=chat, bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False), log_samples=True,
    )  # fmt: skip


def of_hf(chat: bool = False, **arguments: bool) -> dict:
    return results("hf", chat, pretrained=MODEL, dtype="float32", device="cpu", **arguments)


def samples(found: dict, task: str) -> list[dict]:
    return sorted(found["samples"][task], key=lambda sample: sample["doc_id"])


BACKEND = {"tokenizer": MODEL, "tokenizer_backend": "huggingface", "add_bos_token": True}
CLIENTS = {
    "ids": BACKEND,
    "texts": {"tokenizer": MODEL, "tokenizer_backend": "huggingface", "tokenized_requests": False},
    "many at once": {**BACKEND, "num_concurrent": 8},
    "remote tokenizer": {"tokenizer_backend": "remote"},
}
"""Those that send token ids are told to begin a text as `hf` does, but for the last, which cannot. Where texts are sent,
the server begins them, and lm-eval does not count that: it reads one value too early, and only answers compare."""


@pytest.mark.parametrize("name", CLIENTS)
def test_completions(name):
    client = CLIENTS[name]
    found = results("local-completions", model="tiny", base_url=f"{URL}/v1/completions", max_length=512, **client)
    expected = of_hf(add_bos_token=name != "remote tokenizer")
    for ours, theirs in zip(samples(found, "pace_choice"), samples(expected, "pace_choice"), strict=True):
        for (value, is_greedy), (expected_value, expected_greedy) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            if name != "texts":
                assert value == pytest.approx(expected_value, abs=TOLERANCE)
                assert is_greedy == expected_greedy
        assert ours["acc"] == theirs["acc"]
    for ours, theirs in zip(samples(found, "pace_generation"), samples(expected, "pace_generation"), strict=True):
        assert ours["resps"] == theirs["resps"]


def test_chat():
    url = f"{URL}/v1/chat/completions"
    found, expected = results("local-chat-completions", True, model="tiny", base_url=url), of_hf(True)
    for ours, theirs in zip(samples(found, "pace_generation"), samples(expected, "pace_generation"), strict=True):
        assert ours["resps"] == theirs["resps"]
