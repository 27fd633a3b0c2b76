"""Measures the gain of batching and of speculation, as Markdown and one line of JSON.

    python benchmarks/decoding.py                                       # About 8 minutes on two cores.
    python benchmarks/decoding.py --into benchmarks/RESULTS.md          # Tables go between its two lines there.
    python benchmarks/decoding.py --requests 1 8 --new-tokens 16 --repeats 1 --peer-dtypes float32

Requests: prompts of different lengths, each continued by the same number of tokens. They run in one `generate`, one by
one, and in transformers' batched `generate` (padded on the left).

Drafts: the same prompts with and without drafts, greedy or sampled; the texts must be equal. Ways take turns. Each
figure is the median of `--repeats` runs after a warm-up; a ratio is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import add_into_argument, check_page, command, publish
from pace import _C
from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig, SamplingConfig
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.outputs import Metrics

SCRIPT = "benchmarks/decoding.py"
LEAST_LOOKUP, LEAST_ADAPTIVE, LEAST_MTP = 2.0, 0.95, 1.5
"""Target ratios: for prompt lookup on text that copies, for adaptive drafts on any text, and for a layer that was
trained on this text."""

WORDS = (
    "river lantern copper Marisol window silver harbour Quentin basket thunder velvet crates Ludwig cactus piano garden"
).split()


def chat(model: LLMModel, question: str) -> list[int]:
    return model.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
    )


def requests(model: LLMModel, count: int) -> list[list[int]]:
    """Returns different prompts of 12 to 60 tokens."""
    asked = [f"Tell me a story about a {word} and a {other}." for word in WORDS for other in WORDS if word != other]
    asked[::3] = [f"{question} {question}" for question in asked[::3]]
    return [chat(model, asked[index % len(asked)]) for index in range(count)]


def sentences(words_each: int, count: int) -> list[str]:
    return [
        " ".join(WORDS[(7 * index + 3 * place + place * place) % len(WORDS)] for place in range(words_each)) + "."
        for index in range(count)
    ]


# -- measuring ---------------------------------------------------------------------------------------------------------


Way = Callable[[Any], tuple[int, float]]
"""Does a part of the work; returns the number of tokens and their seconds."""


def take_turns(ways: dict[str, Way], pieces: list[Any], repeats: int) -> dict[str, list[float]]:
    """Returns the tokens per second of each way over all pieces, for each round except the first.

    The ways take turns piece by piece, so that a slower moment of the machine affects them all. The order is reversed
    each time, because a way may be slower after another one."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(repeats + 1):
        totals = {name: [0, 0.0] for name in names}
        for piece in pieces:
            names.reverse()
            for name in names:
                num_tokens, seconds = ways[name](piece)
                totals[name][0] += num_tokens
                totals[name][1] += seconds
        if turn:
            for name, (num_tokens, seconds) in totals.items():
                speeds[name].append(num_tokens / seconds)
    return speeds


def ratio(speeds: dict[str, list[float]], name: str, other: str) -> float:
    return statistics.median(a / b for a, b in zip(speeds[name], speeds[other]))


def timed(run: Callable[[], int]) -> tuple[int, float]:
    start = time.perf_counter()
    num_tokens = run()
    return num_tokens, time.perf_counter() - start


# -- requests ----------------------------------------------------------------------------------------------------------


def transformers_way(path: str, dtype: str, rows: list[list[int]], new_tokens: int) -> Way:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    theirs.generation_config.eos_token_id = None
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])

    def run() -> int:
        with torch.no_grad():
            out = theirs.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
        return (out.shape[1] - longest) * len(rows)

    return lambda _: timed(run)


def race_of_requests(
    path: str, counts: list[int], new_tokens: int, repeats: int, peer_dtypes: list[str]
) -> list[dict[str, Any]]:
    """Returns tokens per second of each way, and ratios, for each number of requests."""
    model = LLMModel(path)
    config = SamplingConfig(max_new_tokens=new_tokens, do_sample=False, ignore_eos=True)
    results = []
    for count in counts:
        progress(f"{count} requests of {new_tokens} new tokens")
        rows = requests(model, count)

        def together() -> int:
            return model.generate(rows, config).metrics.num_generated_tokens

        def one_by_one() -> int:
            return sum(model.generate(row, config).metrics.num_generated_tokens for row in rows)

        ways: dict[str, Way] = {"together": lambda _: timed(together), "one at a time": lambda _: timed(one_by_one)}
        for dtype in peer_dtypes:
            ways[f"transformers {dtype}"] = transformers_way(path, dtype, rows, new_tokens)
        speeds = take_turns(ways, [None], repeats)
        others = {name: ratio(speeds, "together", name) for name in ways if name != "together"}
        results.append(
            {
                "requests": count,
                "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
                "together_over": others,
            }
        )
    return results


# -- drafts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Prompts that are answered with and without drafts, one by one."""

    name: str
    drafts: str
    prompts: Callable[[LLMModel], list[Any]]
    config: SamplingConfig
    least: float | None = None
    """The target ratio."""


def copying(model: LLMModel) -> list[Any]:
    """Questions whose answers copy them, and texts that repeat themselves."""
    entries = json.loads((TINY / "prompts.json").read_text(encoding="utf-8"))
    asked = [entry["messages"][-1]["content"] for entry in entries if entry["category"] == "copying"]
    asked += [f"Copy this sentence: {text}" for text in sentences(16, 6)]
    return [chat(model, question) for question in asked]


def repeating(model: LLMModel) -> list[Any]:
    return [" ".join([text] * 6) for text in sentences(10, 6)]


def stories(model: LLMModel) -> list[Any]:
    return [
        chat(model, f"Tell me a story about a {animal}.")
        for animal in ("little fox", "dog", "robot", "boat", "lost scarf", "bear", "rabbit", "clever cat")
    ]


def cases(new_tokens: int) -> list[Case]:
    greedy = SamplingConfig(max_new_tokens=new_tokens, do_sample=False)
    sampled = SamplingConfig(max_new_tokens=new_tokens, do_sample=True, temperature=0.8, seed=1)
    wild = SamplingConfig(max_new_tokens=new_tokens, do_sample=True, temperature=2.0, top_k=0, seed=1, ignore_eos=True)
    return [
        Case("answers that copy the question", "lookup", copying, greedy, LEAST_LOOKUP),
        Case(
            "texts that repeat themselves",
            "lookup",
            repeating,
            SamplingConfig(max_new_tokens=new_tokens, do_sample=False, ignore_eos=True),
            LEAST_LOOKUP,
        ),
        Case("stories", "draft, always 4", stories, greedy),
        Case("stories", "draft", stories, greedy, LEAST_ADAPTIVE),
        Case("stories, sampled at 0.8", "draft", stories, sampled, LEAST_ADAPTIVE),
        Case("stories", "lookup", stories, greedy, LEAST_ADAPTIVE),
        Case("stories, sampled at 0.8", "lookup", stories, sampled, LEAST_ADAPTIVE),
        Case("answers that copy the question", "draft", copying, greedy, LEAST_ADAPTIVE),
        Case("noise, sampled at 2", "draft", stories, wild, LEAST_ADAPTIVE),
        Case("noise, sampled at 2", "lookup", stories, wild, LEAST_ADAPTIVE),
        Case("stories", "mtp", stories, greedy, LEAST_MTP),
        Case("stories, sampled at 0.8", "mtp", stories, sampled),
        Case("noise, sampled at 2", "mtp", stories, wild, LEAST_ADAPTIVE),
    ]


def race_of_drafts(path: str, draft: str, mtp: str | None, new_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Returns the decode speeds with and without drafts for each case. `mtp`: a checkpoint with a layer for multi-token
    prediction; None to leave it out. Raises RuntimeError if the texts differ."""
    configs = {
        "lookup": PromptLookupConfig(),
        "draft": DraftModelConfig(draft),
        "draft, always 4": DraftModelConfig(draft, num_draft_tokens=4, adaptive=False),
    }
    models = {name: LLMModel(path, spec_config=config) for name, config in configs.items()}
    if mtp is not None:
        models["mtp"] = LLMModel(mtp, spec_config="mtp")
    drafters = {name: model._engine.drafter for name, model in models.items()}
    results = []
    for case in [case for case in cases(new_tokens) if case.drafts in models]:
        progress(f"{case.drafts}: {case.name}")
        model = models[case.drafts]
        prompts = case.prompts(model)
        told: dict[int, Metrics] = {}
        texts: dict[str, dict[int, list[int]]] = {"plain": {}, "drafts": {}}

        def decode(name: str, drafter: Drafter, index: int) -> tuple[int, float]:
            """Returns the tokens after the first of a text, and their seconds. All ways share the weights, because
            their place in memory changes speed by a few percent."""
            model.generator.driver.call(lambda engine: setattr(engine, "drafter", drafter)).result()
            out = model.generate(prompts[index], case.config)
            texts[name][index] = out.generated_token_ids[0]
            if name == "drafts":
                told[index] = out.metrics
            return out.metrics.num_generated_tokens - 1, out.metrics.total_seconds - out.metrics.seconds_to_first_token

        ways: dict[str, Way] = {
            "plain": lambda index: decode("plain", NoDraft(), index),
            "drafts": lambda index: decode("drafts", drafters[case.drafts], index),
        }
        speeds = take_turns(ways, list(range(len(prompts))), repeats)
        if texts["plain"] != texts["drafts"]:
            raise RuntimeError(f"{case.name}, {case.drafts}: the texts with and without drafts differ")
        results.append(
            {
                "case": case.name,
                "drafts": case.drafts,
                "plain_tokens_per_second": statistics.median(speeds["plain"]),
                "drafted_tokens_per_second": statistics.median(speeds["drafts"]),
                "speedup": ratio(speeds, "drafts", "plain"),
                "least": case.least,
                "num_drafted": sum(metrics.num_drafted_tokens for metrics in told.values()),
                "num_accepted": sum(metrics.num_accepted_tokens for metrics in told.values()),
                "num_tokens": sum(metrics.num_generated_tokens for metrics in told.values()),
            }
        )
    return results


# -- reporting ---------------------------------------------------------------------------------------------------------


def table_of_requests(results: list[dict[str, Any]]) -> str:
    names = list(results[0]["tokens_per_second"])
    lines = [
        "| requests | " + " | ".join(names) + " | " + " | ".join(f"together over {name}" for name in names[1:]) + " |",
        "|---:|" + "---:|" * (2 * len(names) - 1),
    ]
    for result in results:
        cells = [f"{result['tokens_per_second'][name]:,.0f}" for name in names] + [
            f"{result['together_over'][name]:.2f}" for name in names[1:]
        ]
        lines.append(f"| {result['requests']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table_of_drafts(results: list[dict[str, Any]]) -> str:
    lines = [
        "| text | drafts | plain | with drafts | ratio | asked for | drafted, a token | accepted |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for result in results:
        least = (
            ""
            if result["least"] is None
            else f"{result['least']:.2f}{'' if result['speedup'] >= result['least'] else ', missed'}"
        )
        accepted = f"{result['num_accepted'] / result['num_drafted']:.0%}" if result["num_drafted"] else "-"
        lines.append(
            f"| {result['case']} | {result['drafts']} | {result['plain_tokens_per_second']:,.0f} | "
            f"{result['drafted_tokens_per_second']:,.0f} | "
            f"{result['speedup']:.2f} | {least} | {result['num_drafted'] / result['num_tokens']:.2f} | {accepted} |"
        )
    return "\n".join(lines)


def markdown(report: dict[str, Any]) -> str:
    parts = [f"`{report['command']}` on `{report['isa']}` with {report['threads']} threads, bf16. Tokens a second."]
    if report["requests"]:
        parts.append(table_of_requests(report["requests"]))
    if report["drafts"]:
        parts.append(
            "Decode alone (after the first token), one text at a time; the texts are the same token for token:"
        )
        parts.append(table_of_drafts(report["drafts"]))
    return "\n\n".join(parts) + "\n"


def progress(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(TINY), metavar="PATH", help="default: the bundled model")
    parser.add_argument("--draft", default=str(TINY_DRAFT), metavar="PATH", help="its draft model")
    parser.add_argument(
        "--mtp", metavar="PATH", help="a checkpoint with a layer for multi-token prediction (training/train_head.py)"
    )
    parser.add_argument(
        "--requests",
        nargs="*",
        type=int,
        default=[1, 8, 32, 128],
        metavar="N",
        help="numbers of requests; none for no such race",
    )
    parser.add_argument("--new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument(
        "--peer-dtypes",
        nargs="*",
        default=["float32", "bfloat16"],
        metavar="DTYPE",
        help="of transformers; none to leave it out",
    )
    parser.add_argument("--no-drafts", action="store_true", help="the race of requests alone")
    add_into_argument(parser)
    args = parser.parse_args()
    check_page(args.into, SCRIPT)
    torch.set_num_threads(_C.cpu_info()["default_threads"])
    report = {
        "command": command(SCRIPT),
        "isa": _C.isa(),
        "threads": _C.cpu_info()["default_threads"],
        "requests": race_of_requests(args.model, args.requests, args.new_tokens, args.repeats, args.peer_dtypes),
        "drafts": []
        if args.no_drafts
        else race_of_drafts(args.model, args.draft, args.mtp, args.new_tokens, args.repeats),
    }
    publish(args.into, SCRIPT, markdown(report), report)


if __name__ == "__main__":
    main()
