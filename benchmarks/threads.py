"""Decode beside other work: a second pace process on the same CPUs, and torch's own threads in the same process.

    python benchmarks/threads.py [--model DIR] [--seconds 5] [--rounds 3] [--dtype bfloat16]

Every row alternates with what it is compared to, and the median of the rounds is printed: `two processes` is the tokens/s of both
together over that of one alone, which shared CPUs cannot bring above 1 by much; `pinned` is the same with PACE_PIN_THREADS=1
in both, which puts their threads on the same CPUs, and `pinned apart` with half of the CPUs for each. `a step after torch` is the time
of a step right after a product that torch shares among its threads, over that of a step after the same product on one of them,
which leaves the caches as cold and pace's threads as long asleep. The last line is one JSON object.
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
"""Tokens at which decode steps are taken; the session is cut back to it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint (default: the bundled model)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return worker(options)
    cpus = sorted(os.sched_getaffinity(0))
    halves = [cpus[: len(cpus) // 2], cpus[len(cpus) // 2 :]]
    rows = {
        "two processes": lambda: together(options, [cpus, cpus]) / together(options, [cpus]),
        "two processes, pinned": lambda: together(options, [cpus, cpus], PACE_PIN_THREADS="1") / together(options, [cpus]),
    }
    if halves[0]:
        rows["two processes, pinned apart"] = lambda: together(options, halves, PACE_PIN_THREADS="1") / together(options, [cpus])
    rows["a step after torch"] = lambda: after_torch(options)
    ratios = {name: [measure() for _ in range(options.rounds)] for name, measure in rows.items()}
    for name, values in ratios.items():
        print(f"{name:<28}{statistics.median(values):6.2f}   ({min(values):.2f} to {max(values):.2f})")
    print(json.dumps({"benchmark": "threads", "cpus": len(cpus), "model": options.model, "dtype": options.dtype, "ratios": ratios}))


def together(options: argparse.Namespace, masks: list[list[int]], **environment: str) -> float:
    """Tokens/s of processes that decode at the same time, each on its CPUs, all together."""
    return sum(run["tokens"] / run["seconds"] for run in run_workers(options, masks, "decode", **environment))


def after_torch(options: argparse.Namespace) -> float:
    (run,) = run_workers(options, [sorted(os.sched_getaffinity(0))], "torch")
    return run["all_threads"] / run["one_thread"]


def run_workers(options: argparse.Namespace, masks: list[list[int]], task: str, **environment: str) -> list[dict]:
    command = [sys.executable, __file__, "--worker", "--model", options.model, "--dtype", options.dtype, "--seconds", str(options.seconds)]
    workers = []
    for mask in masks:
        confine = lambda mask=mask: os.sched_setaffinity(0, mask)  # noqa: E731
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, env=os.environ | environment, preexec_fn=confine, **pipes))
    try:
        for process in workers:
            process.stdout.readline()  # it has loaded the model
        for process in workers:
            process.stdin.write(task + "\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.communicate()


def worker(options: argparse.Namespace) -> None:
    from pace.llm import LLMModel

    model = LLMModel(options.model, dtype=options.dtype, progress=False)
    session = model.session()
    session.append([5] * CONTEXT)

    def step() -> None:
        session.append([7])
        session.truncate(CONTEXT)

    for _ in range(20):
        step()
    print("ready", flush=True)
    run = decode if sys.stdin.readline().strip() == "decode" else beside_torch
    print(json.dumps(run(step, options.seconds)), flush=True)


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
            a @ b
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
    one, all_threads = (statistics.median(times) for times in spent.values())
    return {"one_thread": one, "all_threads": all_threads}


if __name__ == "__main__":
    main()
