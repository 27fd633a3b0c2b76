"""Formats the numbers of a load test for people: a table, and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from pace.bench.plots import two_diagrams
from pace.bench.serving.metrics import METRICS, values_ms
from pace.bench.serving.record import Record
from pace.bench.serving.run import Run
from pace.bench.serving.workload import Load

MAX_SEND_LAG_MS = 20.0
"""Above this send delay the client's machine was too busy, which distorts the measured times."""


def table(numbers: dict[str, Any], run: Run, load: Load, percentiles: list[float], goodput: dict[str, float]) -> str:
    """Formats the requests, the answers, and their times."""
    lengths = f"{load.num_prompts} requests of about {load.input_len} + {load.output_len} tokens"
    rows = [
        "requests     {completed:9} answered         {failed:6} failed     {max_concurrent_requests} at once at most, "
        "in {duration:.2f} s",
        "tokens       {total_input_tokens:9} read             {total_output_tokens:6} generated, by the server's count",
        "throughput   {request_throughput:9.2f} requests/s       {output_throughput:.1f} tokens/s generated, "
        "{total_token_throughput:.1f} with those read",
    ]
    lines = [f"{numbers['model_id']}, {load.endpoint}; {lengths}, {_arrivals(load)}"]
    lines += [row.format_map(numbers) for row in rows]
    if goodput:
        goals = ", ".join(f"{name} <= {limit:g} ms" for name, limit in goodput.items())
        lines.append(f"goodput      {numbers['request_goodput']:9.2f} requests/s       {goals}")
    columns = ["mean", "median", "std", *(f"p{share:g}" for share in percentiles)]
    lines.append(f"{'milliseconds':<44}" + "".join(f"{column:>10}" for column in columns))
    for name, explanation in METRICS.items():
        if f"mean_{name}_ms" in numbers:
            cells = [numbers[f"{column}_{name}_ms"] for column in columns]
            title = f"{name.upper():<5} {explanation}"
            lines.append(f"{title:<44}" + "".join(f"{'-' if cell is None else f'{cell:.2f}':>10}" for cell in cells))
    for kind, count in numbers["failures"].items():
        example = next(r.failure.message for r in run.records if r.failure and r.failure.kind == kind)
        lines.append(f"failed       {count} x {kind}: {' '.join(example.split())[:200]}")
    if load.is_open_loop and load.max_concurrency is None and numbers["max_send_lag_ms"] > MAX_SEND_LAG_MS:
        lines.append(
            f"note         a request was sent {numbers['max_send_lag_ms']:.0f} ms late: the client's machine was busy"
        )
    return "\n".join(lines)


def _arrivals(load: Load) -> str:
    limit = f", at most {load.max_concurrency} at once" if load.max_concurrency else ""
    if not load.is_open_loop:
        return f"{load.max_concurrency} at once"
    if load.request_rate == float("inf"):
        return "all at once"
    return f"{load.request_rate:g} a second (burstiness {load.burstiness:g}){limit}"


def plot(run: Run, load: Load, path: Path) -> None:
    """Plots the cumulative distribution of each metric, and the run over time. Raises what `check_plot` raises."""
    complete = [record for record in run.records if record.is_complete]
    title = f"{len(complete)} of {len(run.records)} requests answered, {_arrivals(load)}"
    with two_diagrams(path, title) as (shares, times):
        _shares(shares, complete)
        _over_time(times, run)


def _shares(axes, complete: list[Record]) -> None:
    for name, explanation in METRICS.items():
        values = sorted(value for value in values_ms(complete, name) if value > 0)  # the axis is logarithmic
        if values:
            axes.step(values, numpy.arange(1, len(values) + 1) / len(values), where="post", label=explanation)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.set_ylabel("share that took at most that")
    axes.grid(True, which="both", alpha=0.2)
    if axes.lines:
        axes.legend(loc="lower right", fontsize="small")


def _over_time(axes, run: Run) -> None:
    """Plots tokens per second (those of a request spread evenly over its pieces of text) and requests in flight."""
    num_bins = 60
    edges = numpy.linspace(0, run.duration, num_bins + 1)
    arrivals, weights = [], []
    for record in run.records:
        arrivals += [arrival - run.start for arrival in record.arrivals]
        weights += [record.output_tokens / len(record.arrivals)] * len(record.arrivals) if record.arrivals else []
    tokens, _ = numpy.histogram(arrivals, edges, weights=weights)
    middles = (edges[1:] + edges[:-1]) / 2
    axes.plot(middles, tokens / (edges[1] - edges[0]), label="tokens/s generated")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s generated")
    sent, ended = (numpy.array([getattr(r, name) - run.start for r in run.records]) for name in ("sent", "ended"))
    under_way = [int(((sent <= middle) & (ended > middle)).sum()) for middle in middles]
    right = axes.twinx()
    right.plot(middles, under_way, color="tab:orange", alpha=0.7, label="requests under way")
    right.set_ylabel("requests under way")
    axes.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    axes.grid(True, alpha=0.2)
