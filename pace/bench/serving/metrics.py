"""Metrics of a load test, named as in the files of `vllm bench serve --save-result`."""

from __future__ import annotations

import math
import time
from collections import Counter
from itertools import accumulate
from typing import Any

from pace.bench.serving.record import Record
from pace.bench.serving.run import Run
from pace.bench.serving.workload import ENDPOINTS, Load

METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "itl": "time between pieces of text",
    "e2el": "end-to-end latency",
}
GOALS = ("ttft", "tpot", "e2el")
"""Metrics that a single request has."""


def summary(
    run: Run,
    load: Load,
    model: str,
    metrics: list[str],
    percentiles: list[float],
    goodput: dict[str, float] | None = None,
) -> dict[str, Any]:
    """Computes the numbers of a run. `metrics`: the wanted ones of METRICS. `goodput`: maximum milliseconds for each of
    GOALS that a good request may take.

    Times count from when a request was due. Rates count only complete answers and their tokens, over the whole
    duration. Deviations are those of the population."""
    complete = [record for record in run.records if record.is_complete]
    input_tokens, output_tokens = (
        sum(getattr(r, name) for r in complete) for name in ("input_tokens", "output_tokens")
    )
    numbers: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"), "backend": ENDPOINTS[load.endpoint], "model_id": model,
        "num_prompts": load.num_prompts, "request_rate": load.request_rate if load.request_rate < math.inf else "inf",
        "burstiness": load.burstiness, "max_concurrency": load.max_concurrency, "seed": load.seed,
        "duration": run.duration, "completed": len(complete), "failed": len(run.records) - len(complete),
        "failures": dict(Counter(record.failure.kind for record in run.records if record.failure)),
        "total_input_tokens": input_tokens, "total_output_tokens": output_tokens,
        "request_throughput": len(complete) / run.duration, "request_goodput": None,
        "output_throughput": output_tokens / run.duration,
        "total_token_throughput": (input_tokens + output_tokens) / run.duration,
        "max_concurrent_requests": max_in_flight(run.records),
        "max_send_lag_ms": 1e3 * max(record.sent - record.due for record in run.records),
        "client_cpu_us_per_token": 1e6 * run.cpu_seconds / output_tokens if output_tokens else None,
    }  # fmt: skip
    if goodput:
        good = sum(all(1e3 * getattr(r, name) <= limit for name, limit in goodput.items()) for r in complete)
        numbers["request_goodput"] = good / run.duration
    for name in metrics:
        numbers |= _distribution(name, values_ms(complete, name), percentiles)
    return numbers


def details(run: Run) -> dict[str, Any]:
    """Returns lists with an entry for each request, in seconds. A failed request has the values from before it
    failed."""
    records = run.records
    return {
        "input_lens": [record.input_tokens for record in records],
        "output_lens": [record.output_tokens for record in records],
        "ttfts": [record.ttft if record.arrivals else 0.0 for record in records],
        "itls": [record.itls for record in records],
        "start_times": [record.due - run.start for record in records],
        "errors": [record.failure.message if record.failure else "" for record in records],
    }


def values_ms(complete: list[Record], metric: str) -> list[float]:
    """Returns the milliseconds of each request that has the metric; for "itl", those of all requests together."""
    if metric == "itl":
        return [1e3 * itl for record in complete for itl in record.itls]
    if metric == "tpot":
        return [1e3 * record.tpot for record in complete if record.output_tokens > 1]
    return [1e3 * getattr(record, metric) for record in complete]


def _distribution(name: str, values: list[float], percentiles: list[float]) -> dict[str, float | None]:
    """Returns mean, median, deviation and percentiles; None for each if no request has the metric."""
    import numpy  # not needed by `pace bench --help`

    numbers = {
        f"mean_{name}_ms": numpy.mean,
        f"median_{name}_ms": numpy.median,
        f"std_{name}_ms": numpy.std,
    } | {f"p{share:g}_{name}_ms": lambda given, share=share: numpy.percentile(given, share) for share in percentiles}
    return {key: float(function(values)) if values else None for key, function in numbers.items()}


def max_in_flight(records: list[Record]) -> int:
    """Maximum number of requests in flight at one time."""
    changes = sorted([(record.sent, 1) for record in records] + [(record.ended, -1) for record in records])
    return max(accumulate(change for _, change in changes), default=0)
