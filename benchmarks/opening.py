"""How long a short command takes as a whole: opening a model and writing 60 tokens, next to llama.cpp.

    python benchmarks/opening.py MODEL.gguf ... [--runs 5] [--llama-python PYTHON_WITH_LLAMA_CPP]

Runs of the two follow each other in pairs. Times are medians of whole processes, from start to exit, with the file in
the page cache; memory is the largest resident set. "reading" is the file read by two threads, for comparison.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROMPT, NUM_TOKENS = "The capital of France is", 60
LLAMA = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, n_threads=2, verbose=False)
print(model(sys.argv[2], max_tokens=int(sys.argv[3]), temperature=0)["choices"][0]["text"])
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL.gguf")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="pairs of runs (default: 5)")
    parser.add_argument("--llama-python", metavar="PATH", help="a Python that has llama-cpp-python")
    arguments = parser.parse_args()
    print(f"{'file':<24}{'reading':>9}{'pace':>9}{'memory':>10}{'llama.cpp':>11}{'memory':>10}{'ratio':>8}")
    for path in arguments.models:
        commands = {
            "pace": [
                sys.executable,
                "-m",
                "pace",
                "generate",
                "-m",
                str(path),
                "--max-new-tokens",
                str(NUM_TOKENS),
                PROMPT,
            ]
        }
        if arguments.llama_python:
            commands["llama.cpp"] = [arguments.llama_python, "-c", LLAMA, str(path), PROMPT, str(NUM_TOKENS)]
        read(path)
        found = {name: [] for name in commands}
        for _ in range(arguments.runs):
            for name, command in commands.items():
                found[name].append(run(command))
        reading = statistics.median(read(path) for _ in range(3))
        row = f"{path.name:<24}{reading:>7.2f} s"
        for runs in found.values():
            row += f"{statistics.median(seconds for seconds, _ in runs):>7.2f} s{max(memory for _, memory in runs) / 2**20:>7.0f} MB "
        if "llama.cpp" in found:
            ratios = [ours[0] / theirs[0] for ours, theirs in zip(found["pace"], found["llama.cpp"])]
            row += f"{statistics.median(ratios):>7.2f}"
        print(row, flush=True)
    return 0


RUNNER = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([seconds, peak, done.returncode, done.stdout.decode(errors="replace")[-2000:]]))
"""
"""A small process between: what a large one starts counts that one's memory as its own peak."""


def run(command: list[str]) -> tuple[float, int]:
    """Seconds and peak resident bytes of a process."""
    done = subprocess.run([sys.executable, "-c", RUNNER, *command], stdout=subprocess.PIPE, check=True)
    seconds, peak, status, output = json.loads(done.stdout)
    if status:
        raise RuntimeError(f"{' '.join(command)}: {output}")
    return seconds, peak


def read(path: Path, num_threads: int = 2) -> float:
    """Seconds in which threads read a file, each a part of it."""
    size = path.stat().st_size
    part = -(-size // num_threads)

    def read_part(index: int) -> None:
        buffer = bytearray(4 << 20)
        with open(path, "rb", buffering=0) as file:
            file.seek(index * part)
            left = min(part, size - index * part)
            while left > 0 and (count := file.readinto(memoryview(buffer)[: min(len(buffer), left)])):
                left -= count

    began = time.perf_counter()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(read_part, range(num_threads)))
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
