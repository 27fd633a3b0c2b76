"""Two replicas of one thread beside one replica of two, in `pace.integrations.ray`: tokens a second under the same load.

    python benchmarks/replicas.py [--shape qwen2.5-0.5b] [--clients 2 16 64] [--generate 32] [--rounds 3]

Both applications run in one Ray on this machine and take turns; the one that waits uses no CPU. A shape (`pace bench
--list`) gets random weights in bf16, and each client sends two prompts, streamed, one after the other. Needs
`pip install "pace-llm[ray]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"

import ray  # noqa: E402
from ray import serve  # noqa: E402

from benchmarks.comparison.checkpoint import ensure_checkpoint  # noqa: E402
from pace.assets import TINY  # noqa: E402
from pace.integrations.ray import app  # noqa: E402

APPLICATIONS = {"one": {"num_replicas": 1, "num_threads": 2}, "two": {"num_replicas": 2, "num_threads": 1}}
PROMPT_TOKENS = 32
PORT = 18123


def main() -> None:
    options = arguments()
    model = str(ensure_checkpoint(options.shape, options.folder / options.shape)) if options.shape else str(TINY)
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    for name, replicas in APPLICATIONS.items():
        given = {"model": model, "tokenizer": str(TINY), "kv_cache_bytes": "512MiB", **replicas}
        serve.run(app(given), name=name, route_prefix=f"/{name}")
    rates: dict[tuple[str, int], list[float]] = {}
    before = cpu_seconds()
    for round in range(options.rounds + 1):  # the first one warms up
        for num_clients in options.clients:
            for name in APPLICATIONS:
                rate = load(name, num_clients, options.generate, round)
                if round:
                    rates.setdefault((name, num_clients), []).append(rate)
    spent = {kind: seconds - before[kind] for kind, seconds in cpu_seconds().items()}
    serve.shutdown()
    ray.shutdown()
    report(options, rates, spent)


def load(name: str, num_clients: int, num_tokens: int, round: int) -> float:
    """Generated tokens a second under a closed loop of so many clients, as `pace bench --serve` measures them."""
    command = [sys.executable, "-m", "pace", "bench", "--serve", f"http://127.0.0.1:{PORT}/{name}", "--ignore-eos"]
    command += ["--max-concurrency", str(num_clients), "--num-prompts", str(2 * num_clients), "--seed", str(round)]
    command += ["--input-len", str(PROMPT_TOKENS), "--output-len", str(num_tokens)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])["output_throughput"]


def cpu_seconds() -> dict[str, float]:
    """CPU seconds so far of what stands between a client and a replica."""
    titles = {"proxy": "ray::ProxyActor", "ingress": r"ray::ServeReplica:\w+:ingress"}
    spent = dict.fromkeys(titles, 0.0)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            title, fields = path.read_text(), (path.parent / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        for kind, pattern in titles.items():
            if re.match(pattern, title):
                spent[kind] += sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime
    return spent


def report(options: argparse.Namespace, rates: dict[tuple[str, int], list[float]], spent: dict[str, float]) -> None:
    num_requests = 2 * sum(options.clients) * len(APPLICATIONS) * (options.rounds + 1)
    num_tokens = num_requests * options.generate
    rows = []
    print(
        "| clients | one replica, 2 threads: tokens/s | two replicas, 1 thread each: tokens/s | ratio |\n|---|---|---|---|"
    )
    for num_clients in options.clients:
        one, two = (statistics.median(rates[name, num_clients]) for name in APPLICATIONS)
        ratio = statistics.median(b / a for a, b in zip(rates["one", num_clients], rates["two", num_clients]))
        print(f"| {num_clients} | {one:.0f} | {two:.0f} | {ratio:.2f} |")
        rows.append({"clients": num_clients, "one": one, "two": two, "ratio": ratio})
    costs = {f"{kind}_us_per_token": 1e6 * seconds / num_tokens for kind, seconds in spent.items()}
    print("CPU for each streamed token: " + ", ".join(f"{name} {cost:.0f}" for name, cost in costs.items()))
    print(json.dumps({"shape": options.shape, "generate": options.generate, "rows": rows, **costs}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="default: the bundled model")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "comparison", help="where its weights are kept")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 16, 64])
    parser.add_argument("--generate", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
