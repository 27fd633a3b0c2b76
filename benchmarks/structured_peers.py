"""JSON of a schema beside free text, in pace and in others, one sequence of the same bf16 weights and vocabulary.

    python benchmarks/structured_peers.py --folder FOLDER --python llama.cpp=PYTHON --python guidance-transformers=PYTHON

A runtime whose Python is not given runs in this one, or is left out where its packages are missing: `llama.cpp` needs
llama-cpp-python, `guidance-transformers` guidance 0.3 with transformers 4, `guidance-pace` guidance 0.3 and pace.
Rounds alternate. The schema is `records` of benchmarks/structured.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SCRIPT = "benchmarks/structured_peers.py"
RUNTIMES = ["pace", "guidance-pace", "guidance-transformers", "llama.cpp"]
PROMPT = "The people of the village, as a list: "


def prepare(shape: str, folder: Path) -> Path:
    """A folder with `checkpoint` (weights and tokenizer) and `model.gguf` of them, written the first time."""
    from benchmarks.comparison.checkpoint import ensure_checkpoint
    from benchmarks.comparison.gguf_writer import write_gguf
    from benchmarks.structured import train_tokenizer

    target = folder / f"structured-{shape}"
    checkpoint = ensure_checkpoint(shape, target)
    if not (target / "model.gguf").exists():
        vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        train_tokenizer(vocab_size - 64).save_pretrained(checkpoint)  # room for tokens that readers add
        write_gguf(checkpoint, target / "partial", "bf16", checkpoint)
        (target / "partial").rename(target / "model.gguf")
    return target


def of_pace(folder: Path, num_tokens: int, schema: dict[str, Any]) -> dict[str, float]:
    from pace.llm import Grammar, LLMModel, SamplingConfig

    model = LLMModel(folder / "checkpoint", progress=False)
    free = SamplingConfig(max_new_tokens=num_tokens, ignore_eos=True)
    records = free.copy()
    records.grammar = Grammar.json_schema(schema)
    return {
        name: _rate(lambda config=config: len(model.generate(PROMPT, config).generated_token_ids[0]))
        for name, config in {"free": free, "records": records}.items()
    }


def of_guidance(lm: Any, num_tokens: int, schema: dict[str, Any]) -> dict[str, float]:
    import guidance

    programs = {
        "free": guidance.gen(max_tokens=num_tokens),
        "records": guidance.json(schema=schema, max_tokens=num_tokens),
    }
    return {
        name: _rate(lambda program=program: (lm + PROMPT + program)._get_usage().output_tokens)
        for name, program in programs.items()
    }


def of_guidance_pace(folder: Path, num_tokens: int, schema: dict[str, Any]) -> dict[str, float]:
    from pace.integrations.guidance import Pace

    return of_guidance(Pace(folder / "checkpoint", echo=False, progress=False), num_tokens, schema)


def of_guidance_transformers(folder: Path, num_tokens: int, schema: dict[str, Any]) -> dict[str, float]:
    import torch
    from guidance.models import Transformers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    checkpoint = folder / "checkpoint"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(checkpoint / "tokenizer.json"), eos_token="<end>")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, torch_dtype=torch.bfloat16)
    return of_guidance(Transformers(model, tokenizer, echo=False, enable_monitoring=False), num_tokens, schema)


def of_llama_cpp(folder: Path, num_tokens: int, schema: dict[str, Any]) -> dict[str, float]:
    import llama_cpp

    model = llama_cpp.Llama(
        str(folder / "model.gguf"), n_ctx=1024, n_threads=os.cpu_count(), n_threads_batch=os.cpu_count(), verbose=False
    )
    prompt = model.tokenize(PROMPT.encode(), add_bos=False)

    def count(grammar: Any) -> int:
        model.reset()
        number = 0
        for _ in model.generate(prompt, temp=0.0, repeat_penalty=1.0, grammar=grammar):
            number += 1
            if number == num_tokens:
                break
        return number

    text = json.dumps(schema)
    return {
        "free": _rate(lambda: count(None)),
        "records": _rate(lambda: count(llama_cpp.LlamaGrammar.from_json_schema(text, verbose=False))),
    }


WORKERS = {
    "pace": of_pace,
    "guidance-pace": of_guidance_pace,
    "guidance-transformers": of_guidance_transformers,
    "llama.cpp": of_llama_cpp,
}


def _rate(run: Any) -> float:
    """Tokens a second of `run`, which returns how many it made; after one run that warms up."""
    run()
    begin = time.perf_counter()
    return run() / (time.perf_counter() - begin)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="default: qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, required=True, help="where weights are written, some 2.5 GB")
    parser.add_argument("--python", action="append", default=[], metavar="RUNTIME=PATH", help=", ".join(RUNTIMES))
    parser.add_argument("--generate", type=int, default=96, metavar="N", help="tokens a text (default: 96)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over so many (default: 3)")
    parser.add_argument("--worker", choices=RUNTIMES, help=argparse.SUPPRESS)
    if "--worker" in sys.argv:
        return work(parser.parse_args())

    from benchmarks import page

    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    pythons = dict(item.split("=", 1) for item in options.python)
    if unknown := pythons.keys() - set(RUNTIMES):
        parser.error(f"there is no runtime {', '.join(unknown)}; there are {', '.join(RUNTIMES)}")
    prepare(options.shape, options.folder)
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for runtime in RUNTIMES:
            found = ask(runtime, pythons.get(runtime, sys.executable), options)
            if found is not None:
                rounds.setdefault(runtime, []).append(found)
    page.publish(options.into, SCRIPT, report(page.command(SCRIPT), options, rounds))
    return 0


def ask(runtime: str, python: str, options: argparse.Namespace) -> dict[str, float] | None:
    """What a runtime's worker found; None, and its last words on stderr, where it could not run."""
    command = [python, __file__, "--worker", runtime, "--shape", options.shape, "--folder", str(options.folder)]
    command += ["--generate", str(options.generate)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        print(f"{runtime}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def work(options: argparse.Namespace) -> int:
    from benchmarks.structured_schemas import SCHEMAS

    folder = options.folder / f"structured-{options.shape}"
    print(json.dumps(WORKERS[options.worker](folder, options.generate, SCHEMAS["records"])))
    return 0


def report(command: str, options: argparse.Namespace, rounds: dict[str, list[dict[str, float]]]) -> str:
    lines = [
        f"`{command}`: one sequence of {options.shape} in bf16, {options.generate} tokens, greedy, {options.rounds} rounds.\n",
        "| runtime | free text, tokens/s | records, tokens/s | records to free | pace's records to these |",
        "|---|---:|---:|---:|---:|",
    ]
    for runtime, found in rounds.items():
        free, records = (statistics.median(each[name] for each in found) for name in ("free", "records"))
        ratio = statistics.median(each["records"] / each["free"] for each in found)
        ahead = statistics.median(own["records"] / each["records"] for own, each in zip(rounds["pace"], found))
        lines.append(f"| {runtime} | {free:,.1f} | {records:,.1f} | {ratio:.2f} | {ahead:.2f} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
