"""lm-eval's clients for completions and chat, compared with its own `hf` model of the same directory, on tasks with
local data."""

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
"""Tolerance for sums of log-probabilities. The server's weights are bf16; those of `hf` are fp32, because its bf16
logits are much coarser than pace's."""

os.environ.setdefault("OPENAI_API_KEY", "none")


@cache
def results(kind: str, chat: bool = False, /, **arguments: str | int | bool) -> dict:
    with_tasks = ["pace_generation"] if chat else ["pace_choice", "pace_generation"]
    os.chdir(TASKS)  # the tasks name their data files relative to this folder
    return simple_evaluate(
        model=kind, model_args=dict(arguments), tasks=with_tasks, batch_size=4, apply_chat_template=chat,
        bootstrap_iters=0,
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
"""Client -> its options. Clients that send token ids add the BOS token like `hf`, except the last, which cannot.

If texts are sent, the server adds the BOS token, but lm-eval does not count it. It reads one value too early, so only
the answers are compared."""


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
