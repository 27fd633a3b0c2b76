"""Measures a short command as a whole: opening a model and generating 60 tokens, compared with llama.cpp.

    python benchmarks/opening.py MODEL.gguf ... [--runs 5] [--llama-python PYTHON_WITH_LLAMA_CPP]

"first" packs the weights and keeps a copy, "later" maps the copy. Runs take turns. Times are medians of whole
processes, from start to exit, with the files in the page cache; memory is the peak resident set. "reading" is the time
in which two threads read the file, for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
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
    names = ["first", "later"] + ["llama.cpp"] * bool(arguments.llama_python)
    print(f"{'file':<24}{'reading':>9}" + "".join(f"{name:>11}{'memory':>10}" for name in names), end="")
    print("   first and later / llama.cpp" if arguments.llama_python else "")
    for path in arguments.models:
        with tempfile.TemporaryDirectory() as cache:
            print(measure(path, Path(cache), arguments.runs, arguments.llama_python), flush=True)
    return 0


def measure(path: Path, cache: Path, runs: int, llama_python: str | None) -> str:
    """Returns a line of the table."""
    words = [str(path), PROMPT, str(NUM_TOKENS)]
    read(path)
    found: dict[str, list[tuple[float, int]]] = {}
    for _ in range(runs):
        for copy in cache.iterdir():
            copy.unlink()
        for name in ("first", "later"):
            found.setdefault(name, []).append(run(generate(path), cache))
        if llama_python:
            found.setdefault("llama.cpp", []).append(run([llama_python, "-c", LLAMA, *words]))
    line = f"{path.name:<24}{statistics.median(read(path) for _ in range(3)):>7.2f} s"
    for of_one in found.values():
        seconds, peak = statistics.median(seconds for seconds, _ in of_one), max(memory for _, memory in of_one)
        line += f"{seconds:>9.2f} s{peak / 2**20:>7.0f} MB"
    for name in ("first", "later") if llama_python else ():
        ratios = [ours[0] / theirs[0] for ours, theirs in zip(found[name], found["llama.cpp"])]
        line += f"{statistics.median(ratios):>8.2f}"
    return line


def generate(path: Path) -> list[str]:
    """Returns the measured command."""
    return [sys.executable, "-m", "pace", "generate", str(path), PROMPT, "--max-new-tokens", str(NUM_TOKENS)]


RUNNER = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([seconds, peak, done.returncode, done.stdout.decode(errors="replace")[-2000:]]))
"""
"""A small process that starts the command: the child of a large process would report the parent's memory as its own
peak."""


def run(command: list[str], cache: Path | None = None) -> tuple[float, int]:
    """Returns the seconds and peak resident bytes of a process. `cache`: the folder of packed copies; None for no
    copies."""
    # Bytecode is kept, as in a normal environment; otherwise each process would compile pace again.
    copies = {"PYTHONDONTWRITEBYTECODE": ""} | (
        {"PACE_CACHE": str(cache), "PACE_CACHE_SIZE": "20GiB"} if cache else {"PACE_CACHE_SIZE": "0"}
    )
    command = [sys.executable, "-c", RUNNER, *command]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | copies)
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
