"""What `pace plan` predicts beside what `pace bench` measures, as Markdown; and the shares of the limits that the
predictions are made of.

    python benchmarks/predictions.py > predictions.md                                    # about 12 minutes on two cores, 6 GB of memory
    python benchmarks/predictions.py --shape qwen2.5-0.5b --dtype bfloat16 int8 int4 fp8 --points 512@512 128@16384
    --into benchmarks/RESULTS.md

A point PROMPT@CONTEXT or PROMPT@CONTEXTxBATCH is a prefill of PROMPT tokens, and a decode of BATCH sequences that have
CONTEXT positions each. Ratios are of measured speed to predicted speed, medians over the runs, each with the limits
measured around it.

The second table is measured as `pace.bench.prediction.Efficiency` defines its fields: medians of weights (one
sequence), products (prompts of 512 tokens and more) and prefill_attention (2,048 and more); of the two shares of a
decode step's attention (contexts of 2,048 and more), of which the slower one counts, the largest. Where it disagrees
with the constants for long, the constants are to be changed. The tables go to stdout, or into a FILE between its two
lines that name this script; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.page import add_into_argument, check_page, command, publish
from pace.bench import measure
from pace.bench.limits import Limits
from pace.bench.prediction import Efficiency, efficiency
from pace.bench.result import Phase, Repeat, Result
from pace.quant import FORMATS

SCRIPT = "benchmarks/predictions.py"
MANY_ROWS, LONG = 512, 2048
"""Tokens from which products no longer wait for weights, and positions from which attention is more than its start."""


@dataclass(frozen=True)
class Point:
    prompt: int
    context: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Point:
        match = re.fullmatch(r"(\d+)@(\d+)(?:x(\d+))?", text)
        if not match:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not PROMPT@CONTEXT or PROMPT@CONTEXTxBATCH, such as 512@16384 or 128@512x8"
            )
        return cls(int(match[1]), int(match[2]), int(match[3] or 1))


@dataclass(frozen=True)
class Row:
    """What is kept of a measurement, for its model is not. Speeds in tokens a second."""

    shape: str
    held: str
    """The dtype of the weights, or their format."""
    point: Point
    limits: Limits
    predicted: tuple[float, float]
    """Of prefill and decode, like the next two."""
    measured: tuple[float, float]
    ratio: tuple[float, float]
    reached: Efficiency
    in_use: Efficiency
    """The constants that the prediction was made with."""

    @classmethod
    def of(cls, result: Result, point: Point) -> Row:
        predicted = point.prompt / result.predicted.prefill_seconds, point.batch / result.predicted.step_seconds
        measured = result.prefill_tokens_per_second, result.decode_tokens_per_second
        ratio = result.prefill_ratio, result.decode_ratio
        model, isa = result.subject.model, result.limits.isa
        held = str(model.quantization.format) if model.quantization else str(model.dtype).removeprefix("torch.")
        in_use = efficiency(isa, model.dtype, result.costs.code)
        return cls(result.subject.name, held, point, result.limits, predicted, measured, ratio, reached(result), in_use)


def reached(result: Result) -> Efficiency:
    """The shares of this measurement: its times cut into attention and the rest as in the profiled run."""
    costs, batch, context = result.costs, result.batch, result.context
    attention, prefill_attention = _attention_share(result.decode), _attention_share(result.prefill)

    def median(share: Callable[[Repeat, float, float], float]) -> float:
        return statistics.median(
            share(repeat, 1e9 * repeat.limits.read_gb_s, 1e9 * repeat.limits.fma_gflops) for repeat in result.repeats
        )

    weights = median(
        lambda repeat, bandwidth, peak: costs.decode_weight_bytes / ((1 - attention) * repeat.step_seconds) / bandwidth
    )

    def products(repeat: Repeat, bandwidth: float, peak: float) -> float:
        head_seconds = costs.head_bytes / (weights * bandwidth)
        return (
            result.prompt
            * costs.layer_flops_per_token
            / ((1 - prefill_attention) * repeat.first_token_seconds - head_seconds)
            / peak
        )

    return Efficiency(
        weights=weights,
        products=median(products),
        cache=median(
            lambda repeat, bandwidth, peak: (
                batch * costs.kv_bytes(context) / (attention * repeat.step_seconds) / bandwidth
            )
        ),
        decode_attention=median(
            lambda repeat, bandwidth, peak: (
                batch * costs.decode_attention_flops(context) / (attention * repeat.step_seconds) / peak
            )
        ),
        prefill_attention=median(
            lambda repeat, bandwidth, peak: (
                costs.prefill_attention_flops(result.prompt) / (prefill_attention * repeat.first_token_seconds) / peak
            )
        ),
    )


def _attention_share(phase: Phase) -> float:
    return phase.instructions["attention"][1] / phase.seconds


def fitted(rows: list[Row]) -> Efficiency:
    """Constants that these measurements ask for; NaN where no point tells of one."""

    def of(name: str, tells: Callable[[Point], bool], middle: Callable[[list[float]], float]) -> float:
        told = [getattr(row.reached, name) for row in rows if tells(row.point)]
        return middle(told) if told else float("nan")

    return Efficiency(
        weights=of("weights", lambda point: point.batch == 1, statistics.median),
        products=of("products", lambda point: point.prompt >= MANY_ROWS, statistics.median),
        cache=of("cache", lambda point: point.context >= LONG, max),
        decode_attention=of("decode_attention", lambda point: point.context >= LONG, max),
        prefill_attention=of("prefill_attention", lambda point: point.prompt >= LONG, statistics.median),
    )


def speeds(rows: list[Row]) -> str:
    """Predicted and measured."""
    lines = [
        "| model | held as | prompt | prefill predicted | measured | ratio | decode at | predicted | measured | ratio |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        (prefill, decode), point = zip(row.predicted, row.measured, row.ratio), row.point
        context = f"{point.context:,}" if point.batch == 1 else f"{point.batch} x {point.context:,}"
        cells = "{:,.1f} | {:,.1f} | {:.2f}".format
        lines.append(
            f"| {row.shape} | {row.held} | {point.prompt:,} | {cells(*prefill)} | {context} | {cells(*decode)} |"
        )
    return "\n".join(lines)


def shares(rows: list[Row]) -> str:
    """Fitted shares of the limits, and in brackets the constants in use."""
    names = [field.name for field in fields(Efficiency)]
    lines = ["| instruction set | held as | " + " | ".join(names) + " |", "|---|---|" + "---:|" * len(names)]
    for held in dict.fromkeys(row.held for row in rows):
        alike = [row for row in rows if row.held == held]
        cells = (
            f"{'-' if now != now else f'{now:.2f}'} ({constant:.2f})"
            for now, constant in zip(astuple(fitted(alike)), astuple(alike[0].in_use))
        )
        lines.append(f"| {alike[0].limits.isa} | {held} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(rows: list[Row], command: str) -> str:
    first = rows[0].limits
    read, fma = [row.limits.read_gb_s for row in rows], [row.limits.fma_gflops for row in rows]
    return (
        f"`{command}` on `{first.isa}` with {first.threads} threads; limits from {min(read):.1f} to {max(read):.1f} GB/s and from {min(fma):.0f} to "
        f"{max(fma):.0f} GFLOPS. Tokens a second; ratio: measured over predicted.\n\n{speeds(rows)}\n\n"
        f"Shares of the limits that these runs ask for (in brackets: the constants in use):\n\n{shares(rows)}\n"
    )


def measured_rows(
    shape: str, held: str, points: list[Point], generated: int, repeats: int, num_threads: int | None
) -> Iterator[Row]:
    """One after the other; the model is gone at the end."""
    how = {"quantization": held} if held in FORMATS else {"dtype": held}
    subject = measure.load(shape, num_threads=num_threads, **how)
    for point in points:
        print(
            f"{shape}, {held}: prefill of {point.prompt}, decode of {point.batch} at {point.context} ...",
            file=sys.stderr,
            flush=True,
        )
        row = Row.of(measure.measure(subject, point.prompt, generated, point.batch, repeats, point.context), point)
        print(f"  measured / predicted: prefill {row.ratio[0]:.2f}, decode {row.ratio[1]:.2f}", file=sys.stderr)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=["qwen2.5-0.5b", "llama-3.2-1b"], metavar="MODEL_OR_SHAPE")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], metavar="NAME", help=f"or formats: {', '.join(FORMATS)}"
    )
    points = [Point(128, 128, 1), Point(512, 512, 1), Point(2048, 4096, 1), Point(512, 16384, 1), Point(128, 512, 8)]
    parser.add_argument("--points", nargs="+", type=Point.parse, default=points, metavar="PROMPT@CONTEXTxBATCH")
    parser.add_argument("--generate", type=int, default=16, metavar="N", help="decode steps (default: 16)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--num-threads", type=int, metavar="N", help="default: what `pace env` says")
    add_into_argument(parser)
    args = parser.parse_args()
    check_page(args.into, SCRIPT)
    rows = []
    for shape in args.shape:
        for dtype in args.dtype:
            rows += measured_rows(shape, dtype, args.points, args.generate, args.repeats, args.num_threads)
    publish(args.into, SCRIPT, markdown(rows, command(SCRIPT)))


if __name__ == "__main__":
    main()
