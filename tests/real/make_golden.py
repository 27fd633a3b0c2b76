"""Writes golden.json: the results of llama.cpp for the real models, with llama-cpp-python.

    python -m venv there && there/bin/pip install llama-cpp-python
    there/bin/python tests/real/make_golden.py FOLDER_OF_THE_MODELS

It does not import pace, so that the two do not share a process.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from texts import ODD_TEXTS

HERE = Path(__file__).parent
PROMPTS = {
    "smollm2": ["The capital of France is", "Once upon a time, in a village by the sea,", "def fibonacci(n):\n"],
    "gemma3": ["The capital of France is", "Water boils at", "The three primary colours are"],
    "qwen-coder": ["def fibonacci(n):\n", "// Reverses a string\nfn reverse(", "The three laws of robotics are:\n1."],
}
NUM_TOKENS = 48
PAGES = {name: (HERE / "pages" / f"{name}.txt").read_text(encoding="utf-8") for name in ("english", "code")}


def main() -> None:
    golden = {"llama-cpp-python": llama_cpp.__version__, "models": {}}
    for name, prompts in PROMPTS.items():
        model = llama_cpp.Llama(
            str(Path(sys.argv[1]) / f"{name}.gguf"), n_ctx=2048, n_threads=2, logits_all=True, verbose=False
        )
        golden["models"][name] = {
            "greedy": [greedy(model, prompt) for prompt in prompts],
            "tokens": [{"text": text, "ids": ids(model, text)} for text in ODD_TEXTS],
            "perplexity": {page: perplexity(model, text) for page, text in PAGES.items()},
        }
    (HERE / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def ids(model: llama_cpp.Llama, text: str) -> list[int]:
    return model.tokenize(text.encode(), add_bos=True, special=True)


def greedy(model: llama_cpp.Llama, prompt: str) -> dict:
    tokens, found = ids(model, prompt), []
    for token in model.generate(tokens, temp=0.0, top_k=1, repeat_penalty=1.0):
        if token == model.token_eos() or len(found) == NUM_TOKENS:
            break
        found.append(int(token))
    return {"prompt": prompt, "prompt_ids": tokens, "ids": found}


def perplexity(model: llama_cpp.Llama, text: str) -> dict:
    tokens = ids(model, text)[:512]
    model.reset()
    model.eval(tokens)
    rows = np.asarray(model.scores[: len(tokens) - 1], np.float64)
    largest = rows.max(axis=1, keepdims=True)
    log_sums = largest[:, 0] + np.log(np.exp(rows - largest).sum(axis=1))
    mean = float((log_sums - rows[np.arange(len(rows)), tokens[1:]]).mean())
    return {"ids": tokens, "perplexity": math.exp(mean)}


if __name__ == "__main__":
    main()
