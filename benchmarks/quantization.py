"""Compares every format of quantised weights with bf16 and llama.cpp's nearest type: memory and speed, as Markdown and
one line of JSON.

    python benchmarks/quantization.py                                     # qwen2.5-0.5b, about 20 minutes on two cores.
    python benchmarks/quantization.py --into benchmarks/RESULTS.md        # The table goes between its two lines there.
    python benchmarks/quantization.py smollm2-135m --formats int4 --prompt 64 --generate 8 --rounds 1

Weights are random in a known shape, and each runtime has a separate process. Conversions in `--folder` are shared with
`benchmarks/compare.py`. For each format three runtimes take turns, in reverse order every other round: pace in bf16,
pace in the format, llama.cpp in its nearest type. Speeds are medians over the rounds, ratios medians of the ratios
within a round. Without llama-cpp-python its columns stay empty.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.comparison.checkpoint import ensure_checkpoint  # noqa: E402
from benchmarks.comparison.measure import ensure_conversion  # noqa: E402
from benchmarks.comparison.worker import MACHINE, Worker, WorkerError  # noqa: E402
from benchmarks.page import add_into_argument, check_page, publish  # noqa: E402
from pace.bench.limits import Limits, between  # noqa: E402
from pace.bench.shapes import SHAPES  # noqa: E402

SCRIPT = "benchmarks/quantization.py"
NEAREST = {
    "int8": "q8_0",
    "fp8": "q8_0",
    "mxfp8": "q8_0",
    "int4": "q4_0",
    "nf4": "iq4_nl",
    "fp4": "iq4_nl",
    "mxfp4": "iq4_nl",
    **{
        name: name
        for name in ("q1_0", "q2_0", "tq1_0", "tq2_0", "q2_k", "q6_k", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
    },
    **{name: f"{name}_s" for name in ("q3_k", "q4_k", "q5_k")},
}
"""Maps a format to llama.cpp's type with the same number of bits. 4-bit codes are evenly spaced in q4_0, and not in
iq4_nl."""
FLOATS, PEER = "bf16", "peer"


@dataclass
class Row:
    """One format. Speeds are in tokens per second. Ratios are of pace in this format over the other; None if the other
    is missing."""

    format: str
    bits: float
    """Bits of memory per weight of the model, over all matrices."""
    peak_mib: float
    prefill: float
    decode: float
    decode_mbu: float
    prefill_mfu: float
    prefill_over_bf16: float
    decode_over_bf16: float
    nearest: str
    prefill_over_nearest: float | None
    decode_over_nearest: float | None


class Race:
    """The loaded runtimes of one format."""

    def __init__(self, options: argparse.Namespace, format: str, stack: ExitStack) -> None:
        self.options = options
        checkpoint = ensure_checkpoint(options.shape, options.folder / options.shape)
        self.workers: dict[str, Worker] = {}
        self.weight_bytes: dict[str, int] = {}
        for name, runtime, variant, source in (
            (FLOATS, "pace", FLOATS, checkpoint),
            (format, "pace", format, checkpoint),
            (PEER, "llama.cpp", NEAREST[format], None),
        ):
            try:
                source = source or ensure_conversion(
                    runtime, variant, checkpoint, options.folder / options.shape, options.python
                )
                worker = stack.enter_context(start(runtime, options))
                loaded = worker.ask("load", source=str(source), variant=variant, threads=options.threads)
            except (WorkerError, OSError) as error:
                if runtime == "pace":
                    raise
                say(f"no {runtime} {variant}: {error}")
                continue
            self.workers[name], self.weight_bytes[name] = worker, loaded["step_weight_bytes"]

    def run(self, machine: Worker, vocab_size: int) -> dict[str, list[dict[str, Any]]]:
        """Returns the prefill and decode rates of each runtime for every round, with the limits measured around
        them."""
        prompt, steps = self.options.prompt, self.options.generate
        told: dict[str, list[dict[str, Any]]] = {name: [] for name in self.workers}
        for index in range(self.options.rounds + 1):
            ids = np.random.default_rng(index).integers(vocab_size, size=(1, prompt)).tolist()
            for name in list(self.workers)[:: -1 if index % 2 else 1]:
                before = Limits(**machine.ask("limits"))
                timing = self.workers[name].ask("run", prompts=ids, generated=steps)
                limits = between(before, Limits(**machine.ask("limits")))
                if index:  # the first round warms up
                    told[name].append(
                        {"prefill": prompt / timing["prefill_s"], "decode": 1 / timing["step_s"], **asdict(limits)}
                    )
        return told


def start(runtime: str, options: argparse.Namespace) -> Worker:
    environment = {"PACE_ISA": options.isa} if options.isa and runtime in (MACHINE, "pace") else {}
    python = options.python.get(runtime, sys.executable)
    return Worker(runtime, python, environment, options.folder / "log.txt")


def measure(options: argparse.Namespace, format: str, machine: Worker) -> Row:
    import torch

    from pace.bench.costs import Costs
    from pace.llm.models.model_list import read_config
    from pace.ops import reference

    model_class, config = read_config(SHAPES[options.shape])
    costs = Costs.of(model_class(config, torch.float32, reference), torch.float32)
    with ExitStack() as stack:
        race = Race(options, format, stack)
        told = race.run(machine, config.vocab_size)
        peak = race.workers[format].ask("status")["peak_mib"]

    def median(name: str, value) -> float:
        return statistics.median(value(run) for run in told[name])

    def over(name: str, what: str) -> float | None:
        return (
            statistics.median(ours[what] / theirs[what] for ours, theirs in zip(told[format], told[name]))
            if name in told
            else None
        )

    kv_bytes = costs.kv_bytes(options.prompt + options.generate // 2) // 2
    flops = costs.prefill_flops(options.prompt) / options.prompt
    return Row(
        format=format,
        bits=8 * race.weight_bytes[format] / (costs.decode_weight_bytes / 4),
        peak_mib=peak,
        prefill=median(format, lambda run: run["prefill"]),
        decode=median(format, lambda run: run["decode"]),
        decode_mbu=median(
            format, lambda run: (race.weight_bytes[format] + kv_bytes) * run["decode"] / (1e9 * run["read_gb_s"])
        ),
        prefill_mfu=median(format, lambda run: flops * run["prefill"] / (1e9 * run["fma_gflops"])),
        prefill_over_bf16=over(FLOATS, "prefill"),
        decode_over_bf16=over(FLOATS, "decode"),
        nearest=NEAREST[format],
        prefill_over_nearest=over(PEER, "prefill"),
        decode_over_nearest=over(PEER, "decode"),
    )


def markdown(report: dict) -> str:
    lines = [
        f"`{report['command']}`: {report['shape']} on `{report['isa']}` with {report['threads']} threads. A "
        f"prompt of {report['prompt']} tokens, {report['generate']} decode steps after it. "
        "MFU is the rate of the prompt's multiply-adds over the fp32 peak. "
        "MBU is the rate of the bytes that a step reads over the read bandwidth. "
        "Both limits are measured before and after each run. Bits are those that a decode step reads for each weight.",
        "",
        (
            "| format | bits | peak MiB | prefill t/s | MFU | decode t/s | MBU | prefill / bf16 | decode / bf16 | "
            "llama.cpp | prefill / it | decode / it |"
        ),
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|",
    ]
    for row in report["rows"]:
        ratios = [
            "" if value is None else f"{value:.2f}"
            for value in (row["prefill_over_nearest"], row["decode_over_nearest"])
        ]
        lines.append(
            f"| {row['format']} | {row['bits']:.2f} | {row['peak_mib']:,.0f} | {row['prefill']:.1f} | "
            f"{row['prefill_mfu']:.2f} | {row['decode']:.1f} | {row['decode_mbu']:.2f} | "
            f"{row['prefill_over_bf16']:.2f} | {row['decode_over_bf16']:.2f} | {row['nearest']} | {ratios[0]} | "
            f"{ratios[1]} |"
        )
    return "\n".join(lines) + "\n"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default="qwen2.5-0.5b", choices=list(SHAPES), metavar="SHAPE")
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(NEAREST),
        choices=list(NEAREST),
        metavar="FORMAT",
        help=f"of {', '.join(NEAREST)}; default: all",
    )
    parser.add_argument("--prompt", type=int, default=512, metavar="N")
    parser.add_argument("--generate", type=int, default=48, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, metavar="N", help="default: what `pace env` says")
    parser.add_argument("--isa", help="pace's instruction set (PACE_ISA); llama.cpp uses what it was built for")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "compare",
        help="checkpoints and conversions (default: build/compare)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="llama.cpp=PATH",
        help="the interpreter that has llama-cpp-python",
    )
    add_into_argument(parser)
    options = parser.parse_args(arguments)
    options.python = dict(pair.split("=", 1) for pair in options.python)
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    check_page(options.into, SCRIPT)
    options.folder.mkdir(parents=True, exist_ok=True)
    with start(MACHINE, options) as machine:
        about = machine.ask("machine", threads=options.threads)
        options.threads = about["threads"]
        rows = []
        for format in options.formats:
            say(f"{options.shape}, {format}")
            rows.append(asdict(measure(options, format, machine)))
    named = [
        f"--{name} {getattr(options, name)}"
        for name in ("isa", "prompt", "generate", "rounds")
        if getattr(options, name) != parse([]).__dict__[name]
    ]
    report = {
        "command": " ".join(["python benchmarks/quantization.py", options.shape, *named]),
        "shape": options.shape,
        "isa": about["isa"],
        "threads": options.threads,
    }
    report |= {"prompt": options.prompt, "generate": options.generate, "rounds": options.rounds, "rows": rows}
    publish(options.into, SCRIPT, markdown(report), report)


if __name__ == "__main__":
    main()
