"""Greedy answers of a checkpoint to its fixed list of prompts, with transformers.

    python training/eval_prompts.py pace/assets/tiny --dtype float32 --dtype bfloat16

An entry of prompts.json has `messages` (and perhaps `tools`) for the chat template, or a bare `prompt`. Its `match` is
the rule for a right answer:

- "exact": The text equals `expected`, and the model stopped by itself.
- "prefix": The text begins with `expected`.
- "contains": The text has each of the words in `contains`, and stopped.
"""

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch

MAX_NEW_TOKENS = 320


def load_prompts(folder):
    return json.loads((Path(folder) / "prompts.json").read_text(encoding="utf-8"))


def prompt_ids(tokenizer, entry):
    if "prompt" in entry:
        return tokenizer(entry["prompt"])["input_ids"]
    return tokenizer.apply_chat_template(
        entry["messages"], tools=entry.get("tools"), add_generation_prompt=True, return_dict=True
    )["input_ids"]


def is_right(entry, text, stopped):
    """True if generated `text` (without special tokens) answers `entry`. `stopped`: it ended with an end-of-sequence
    token."""
    if entry["match"] == "prefix":
        return text.startswith(entry["expected"])
    if entry["match"] == "contains":
        return stopped and all(word in text for word in entry["contains"])
    return stopped and text == entry["expected"]


def max_new_tokens(tokenizer, entry):
    """Number of tokens for the answer and its end, and no more, so that a wrong answer costs little time."""
    return (
        MAX_NEW_TOKENS
        if entry["match"] == "contains"
        else len(tokenizer(entry["expected"], add_special_tokens=False)["input_ids"]) + 4
    )


@torch.no_grad()
def answers(model, tokenizer, entries, batch_size=32):
    """[(text, stopped, margin)] by left-padded greedy generation; margin is the smallest gap between the best two
    logits on the way."""
    results = [None] * len(entries)
    order = sorted(range(len(entries)), key=lambda i: max_new_tokens(tokenizer, entries[i]))
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = tokenizer.pad(
            {"input_ids": [prompt_ids(tokenizer, entries[i]) for i in chosen]}, padding_side="left", return_tensors="pt"
        )
        limit = max(max_new_tokens(tokenizer, entries[i]) for i in chosen)
        out = model.generate(
            **batch, max_new_tokens=limit, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        ends = set(model.generation_config.eos_token_id)
        top = torch.stack(out.logits).float().topk(2, -1).values
        gaps = (top[..., 0] - top[..., 1]).T
        for i, ids, gap in zip(chosen, out.sequences[:, batch["input_ids"].shape[1] :].tolist(), gaps):
            stop = next((n for n, token in enumerate(ids) if token in ends), None)
            ids = ids if stop is None else ids[: stop + 1]
            results[i] = tokenizer.decode(ids, skip_special_tokens=True), stop is not None, gap[: len(ids)].min().item()
    return results


def fresh_entries(per_task, seed="fresh"):
    """New random prompts for the tasks with one right answer, to measure the model's general accuracy."""
    import tasks
    from stories import MARK

    rng = random.Random(seed)
    open_ended = (tasks.a_story, tasks.naming, tasks.unknown, tasks.small_talk)
    return [
        {
            "category": task.__name__,
            "messages": [{"role": "user", "content": user}],
            "match": "exact",
            "expected": answer.replace(MARK, ""),
        }
        for task in tasks.TASKS
        if task not in open_ended
        for user, answer in (task(rng) for _ in range(per_task))
    ]


def main():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--prompts", help="folder of prompts.json, if not the same")
    parser.add_argument("--dtype", action="append", choices=["float32", "bfloat16"])
    parser.add_argument("--show-stories", action="store_true")
    parser.add_argument(
        "--fresh", type=int, metavar="N", help="instead of the list, N prompts of each task made up anew"
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    entries = fresh_entries(args.fresh) if args.fresh else load_prompts(args.prompts or args.folder)
    for dtype in args.dtype or ["float32"]:
        model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=getattr(torch, dtype)).eval()
        right, total, smallest = defaultdict(int), defaultdict(int), defaultdict(lambda: float("inf"))
        for entry, (text, stopped, margin) in zip(entries, answers(model, tokenizer, entries)):
            category, good = entry["category"], is_right(entry, text, stopped)
            total[category] += 1
            right[category] += good
            if entry["match"] == "exact":
                smallest[category] = min(smallest[category], margin)
            if not good:
                asked = entry.get("prompt") or entry["messages"][-1]["content"]
                print(f"  wrong: {asked!r}\n    got {text!r}{'' if stopped else ' (no end)'}")
                print(f"    want {entry.get('expected', entry.get('contains'))!r}")
            elif args.show_stories and category == "stories":
                print(text, end="\n\n")
        print(
            f"{dtype}: {sum(right.values())} of {len(entries)} right; "
            + ", ".join(
                f"{c} {right[c]}/{total[c]}" + (f" (margin {smallest[c]:.2f})" if c in smallest else "") for c in total
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
