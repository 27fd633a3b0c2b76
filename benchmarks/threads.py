"""Measures decode while other work runs: a second pace process on the same CPUs, and torch's own threads in the same
process.

    python benchmarks/threads.py [--model DIR] [--seconds 5] [--rounds 3] [--dtype bfloat16]

Every row alternates with its baseline, and the median of the rounds is printed. `two processes` is the tokens/s of both
together over that of one alone; on shared CPUs this cannot be much above 1. `pinned` is the same with
PACE_PIN_THREADS=1 in both, which puts their threads on the same CPUs. In `pinned apart` each has half of the CPUs.

`a step after torch` is the time of a step right after a product on all of torch's threads. It is relative to a step
after the same product on a single thread. That leaves the caches just as cold, and pace's threads asleep for just as
long. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from pace.assets import TINY

CONTEXT = 128
"""Length at which decode steps are measured; the session is truncated back to it."""


class Worker:
    """A process with a model on `cpus` that waits for tasks."""

    def __init__(self, model: str, dtype: str, cpus: list[int], **environment: str):
        command = [sys.executable, __file__, "--worker", "--model", model, "--dtype", dtype]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(
            command, env=os.environ | environment, preexec_fn=lambda: os.sched_setaffinity(0, cpus), **pipes
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.communicate()

    def begin(self, task: str, seconds: float) -> None:
        self.process.stdin.write(f"{task} {seconds}\n")
        self.process.stdin.flush()

    def result(self) -> dict:
        return json.loads(self.process.stdout.readline())


def together(workers: list[Worker], seconds: float) -> float:
    """Tokens/s of all workers together, which decode at the same time."""
    for worker in workers:
        worker.begin("decode", seconds)
    results = [worker.result() for worker in workers]
    return sum(result["tokens"] / result["seconds"] for result in results)


def two_to_one(
    model: str, dtype: str, seconds: float, rounds: int, masks: list[list[int]], **environment: str
) -> list[float]:
    """Tokens/s of two processes over that of one on all CPUs, for each round."""
    every = sorted(os.sched_getaffinity(0))
    with (
        Worker(model, dtype, every) as alone,
        Worker(model, dtype, masks[0], **environment) as one,
        Worker(model, dtype, masks[1], **environment) as other,
    ):
        for worker in (alone, one, other):  # warm up: the model is already loaded
            together([worker], 0.1)
        ratios = []
        for _ in range(rounds):
            best = together([alone], seconds)
            ratios.append(together([one, other], seconds) / best)
        return ratios


def after_torch(model: str, dtype: str, seconds: float, rounds: int) -> list[float]:
    with Worker(model, dtype, sorted(os.sched_getaffinity(0))) as worker:
        ratios = []
        for _ in range(rounds):
            worker.begin("torch", seconds)
            result = worker.result()
            ratios.append(result["all_threads"] / result["one_thread"])
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint (default: the bundled model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(options.model, options.dtype)
    how = (options.model, options.dtype, options.seconds, options.rounds)
    cpus = sorted(os.sched_getaffinity(0))
    halves = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    rows = {
        "two processes": lambda: two_to_one(*how, [cpus, cpus]),
        "two processes, pinned": lambda: two_to_one(*how, [cpus, cpus], PACE_PIN_THREADS="1"),
        "two processes, pinned apart": lambda: two_to_one(*how, halves, PACE_PIN_THREADS="1"),
        "a step after torch": lambda: after_torch(*how),
    }
    if not halves[0]:
        del rows["two processes, pinned apart"]
    ratios = {}
    for name, measure in rows.items():
        values = ratios[name] = measure()
        print(f"{name:<28}{statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})", flush=True)
    print(
        json.dumps(
            {
                "benchmark": "threads",
                "cpus": len(cpus),
                "model": options.model,
                "dtype": options.dtype,
                "ratios": ratios,
            }
        )
    )


def work(path: str, dtype: str) -> None:
    from pace.llm import LLMModel

    session = LLMModel(path, dtype=dtype, progress=False).session()
    session.append([5] * CONTEXT)

    def step() -> None:
        session.append([7])
        session.truncate(CONTEXT)

    for line in sys.stdin:
        task, seconds = line.split()
        print(json.dumps({"decode": decode, "torch": beside_torch}[task](step, float(seconds))), flush=True)


def decode(step, seconds: float) -> dict:
    tokens, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        step()
        tokens += 1
    return {"tokens": tokens, "seconds": spent}


def beside_torch(step, seconds: float) -> dict:
    """Median seconds of a step after a product on one of torch's threads, and on all of them."""
    import torch

    a, b = torch.randn(512, 512), torch.randn(512, 512)
    spent: dict[int, list[float]] = {1: [], torch.get_num_threads(): []}
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for threads, times in spent.items():
            torch.set_num_threads(threads)
            time.sleep(0.05)  # torch's threads spin for a while after a product; those of the last turn are asleep now
            for _ in range(10):
                a @ b
                began = time.perf_counter()
                step()
                times.append(time.perf_counter() - began)
    one, all_threads = (statistics.median(times) for times in spent.values())
    return {"one_thread": one, "all_threads": all_threads}


if __name__ == "__main__":
    main()
