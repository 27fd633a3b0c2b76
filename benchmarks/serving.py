"""Measures the cost of HTTP: `pace serve` compared with `generate` of the same engine, the server under load, and
llama-cpp-python's server.

    python benchmarks/serving.py [MODEL] [--tokenizer PATH] [--into benchmarks/RESULTS.md]

    python benchmarks/serving.py --shape qwen2.5-0.5b --parts ratios delays --generate 32

    python benchmarks/serving.py --shape qwen2.5-0.5b --parts llama.cpp --llama-python PATH --generate 16

`generate` and the servers are processes that keep their models and take turns. The load comes from another process on
the same cores. A shape (`pace bench --list`) gets random weights in q8_0, in a GGUF file that both servers read. For
the other server: pip install "llama-cpp-python[server]", in any environment.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.serving_costs.clients import (  # noqa: E402
    Generate,
    bytes_of_a_connection,
    percentile,
    seconds_to_first_token,
    seconds_to_let_go,
    stream_at_once,
    times_of,
)
from benchmarks.serving_costs.servers import LlamaServer, PaceServer  # noqa: E402
from pace import _C  # noqa: E402
from pace.assets import TINY  # noqa: E402

SCRIPT = "benchmarks/serving.py"
CLIENTS = (1, 8, 32)
"""Numbers of clients for the comparison of both servers."""

Rows = list[tuple[str, str]]
"""Names of the measurements, and their values."""


def ratios(server: PaceServer, options: argparse.Namespace) -> Rows:
    """Measures tokens per second and the first token of `generate` and of the server in turn."""
    generate = Generate(options.model, options.tokenizer, options.quantization, options.streams, options.generate)
    both: dict[int, list[tuple[float, float]]] = {number: [] for number in (1, 8, options.streams)}
    first: list[float] = []
    try:
        for round in range(options.rounds + 1):  # the first round warms up
            for number, pairs in both.items():
                rate, seconds = generate(number)
                load = server.load(max(number, 4), options.generate, "--max-concurrency", str(number))
                if round:
                    pairs.append((rate, load["output_throughput"]))
                    first += [1e3 * (seconds_to_first_token(server) - seconds)] if number == 1 else []
    finally:
        generate.stop()
    rows = [
        (
            f"tokens a second, {number} streams: `generate`, `pace serve`, ratio",
            f"{statistics.median(a for a, _ in pairs):,.0f}, {statistics.median(b for _, b in pairs):,.0f}, "
            f"**{statistics.median(b / a for a, b in pairs):.2f}**",
        )
        for number, pairs in both.items()
    ]
    return [*rows, ("first token, one client, beyond `generate`'s", f"{statistics.median(first):.1f} ms")]


def delays(server: PaceServer, options: argparse.Namespace) -> Rows:
    """Measures the delays of a client and of the event loop while all streams decode."""
    streams, generated = options.streams, options.generate

    def load(times: int) -> dict[str, float]:
        return server.load(times * streams, generated, "--max-concurrency", str(streams))

    begin = server.cpu_seconds
    alone = load(4)
    cpu = (server.cpu_seconds - begin) / alone["total_output_tokens"]
    with server.lags() as lags:
        load(4)
    with times_of(lambda: server.get("/health"), 0.02) as health:
        load(4)
    with times_of(lambda: seconds_to_first_token(server), 0.05) as first:
        load(4)
    under = f"{streams} streams"
    return [
        (
            f"between two pieces of text of a stream, {under}: median, 99th percentile",
            f"{alone['median_itl_ms']:.1f}, {alone['p99_itl_ms']:.1f} ms",
        ),
        (f"the server's CPU a streamed token, {under}", f"{1e6 * cpu:.0f} us"),
        (f"event loop late, {under}: median, 90th, 99th percentile", _percentiles(lags)),
        (f"`/health`, {under}: median, 90th, 99th percentile", _percentiles(health)),
        (f"first token while {under} decode: median, 90th, 99th percentile", _percentiles(first)),
    ]


def _percentiles(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * percentile(seconds, share):.1f}" for share in (0.5, 0.9, 0.99)) + " ms"


def connections(server: PaceServer, options: argparse.Namespace) -> Rows:
    cancels = [seconds_to_let_go(server) for _ in range(10)]
    return [
        ("a client leaves: until its blocks are free", f"{1e3 * statistics.median(cancels):.1f} ms"),
        ("memory of an idle connection", f"{bytes_of_a_connection(server) / 1024:.0f} KiB"),
        (
            "start of the process to `/live`, to the model",
            f"{server.seconds_to_live:.2f}, {server.seconds_to_ready:.1f} s",
        ),
    ]


def overload(server: PaceServer, options: argparse.Namespace) -> Rows:
    """Counts requests answered in time, at the rate that the server can sustain and at three times that."""
    streams, generated = options.streams, options.generate
    rate = server.load(3 * streams, generated, "--max-concurrency", str(streams))["request_throughput"]
    good = {}
    for times in (1, 3):
        number = max(3 * streams, int(8 * rate * times))
        goals = ["--goodput", "ttft:2000", "tpot:100"]
        load = server.load(number, generated, "--request-rate", f"{rate * times:.2f}", *goals)
        good[times] = load["request_goodput"]
    return [
        (
            "requests a second with the first token in 2 s, then 100 ms each: at full load, at three times that",
            f"{good[1]:.1f}, {good[3]:.1f} (**{good[3] / max(good[1], 1e-9):.2f}**)",
        )
    ]


def beside_llama(server: PaceServer, options: argparse.Namespace) -> Rows:
    """Measures tokens per second and the first token of both servers in turn. The other one answers one request at a
    time."""
    other = LlamaServer(options.llama_python, Path(options.model), _C.cpu_info()["default_threads"])
    measured: dict[tuple[int, str], list[tuple[float, float]]] = {}
    try:
        for round in range(options.rounds + 1):  # the first round warms up
            for clients in CLIENTS if round else CLIENTS[:1]:
                for name, asked in (("pace", server), ("llama", other)):
                    found = stream_at_once(asked, clients, options.generate, f"{round} {clients}")
                    measured.setdefault((clients, name), []).extend([found] if round else [])
    finally:
        other.stop()
    rows = []
    for clients in CLIENTS:
        pace, llama = (measured[clients, name] for name in ("pace", "llama"))
        rates, firsts = [[statistics.median(run[i] for run in runs) for runs in (pace, llama)] for i in (0, 1)]
        rows += [
            (
                f"tokens a second, {clients} clients: `pace serve`, `llama_cpp.server`, ratio",
                (
                    f"{rates[0]:,.1f}, {rates[1]:,.1f}, "
                    f"**{statistics.median(a[0] / b[0] for a, b in zip(pace, llama)):.2f}**"
                ),
            ),
            (f"first token, {clients} clients, median: the same", f"{firsts[0]:.2f}, {firsts[1]:.2f} s"),
        ]
    return rows


PARTS: dict[str, Callable[[PaceServer, argparse.Namespace], Rows]] = {
    "ratios": ratios,
    "delays": delays,
    "connections": connections,
    "overload": overload,
    "llama.cpp": beside_llama,
}


def measure(options: argparse.Namespace) -> Rows:
    """Runs the requested parts one by one, on one server."""
    arguments = [options.model, "--max-wait", str(options.max_wait)]
    arguments += ["--tokenizer", options.tokenizer] if options.tokenizer else []
    arguments += ["--quantization", options.quantization] if options.quantization else []
    server = PaceServer(arguments)
    try:
        return [row for part in options.parts for row in PARTS[part](server, options)]
    finally:
        server.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY), help="default: the bundled model")
    parser.add_argument("--shape", help="random weights in this shape, in place of a model")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compare", help="where shapes are kept")
    parser.add_argument("--tokenizer", help="where the model has none")
    parser.add_argument("--quantization", metavar="FORMAT", help="of the weights")
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS)[:-1], help="default: all but llama.cpp"
    )
    parser.add_argument("--llama-python", metavar="PATH", help="a python that has llama_cpp.server")
    parser.add_argument("--max-wait", type=float, default=1.5, metavar="SECONDS", help="of the server (default: 1.5)")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--generate", type=int, default=200, metavar="N", help="tokens of an answer (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="medians are over so many (default: 5)")
    page.add_into_argument(parser)
    options = parser.parse_args()
    if "llama.cpp" in options.parts and not (options.llama_python and (options.shape or Path(options.model).is_file())):
        parser.error("--parts llama.cpp needs --llama-python, and a .gguf file or --shape")
    return options


def main() -> int:
    options = parse()
    name = f"{options.shape or Path(options.model).name}{' next to llama.cpp' * ('llama.cpp' in options.parts)}"
    table = f"{SCRIPT} {name}"
    page.check_page(options.into, table)
    if options.shape:
        from benchmarks.serving_costs.shape import ensure_gguf

        options.model = str(ensure_gguf(options.shape, options.folder))
    rows = measure(options)
    lines = [
        f"`{page.command(SCRIPT)}`: {Path(options.model).name}, {options.generate} tokens an answer, "
        f"{options.rounds} rounds.\n",
        "| what | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows),
    ]
    page.publish(options.into, table, "\n".join(lines) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
