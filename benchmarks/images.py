"""Measures images of models with random weights: what an encoding costs other streams, and speeds next to llama.cpp's
mtmd. These are the time to the first token, and the tokens a second after it.

    python benchmarks/images.py --parts gaps                            # About 15 minutes for a Qwen3-VL-2B.
    python benchmarks/images.py --parts first-token --num-sizes 1 $LLAMA    # About 5 minutes once files are written.
    python benchmarks/images.py --parts first-token --shapes tiny $LLAMA    # A minute for all families.

LLAMA stands for `--llama-python PATH --llama-source PATH`.

Both runtimes are processes that keep their models and take turns. Each run has another image, a PNG whose sides need no
resizing, so that no cache helps. Each figure is the median of `--rounds` runs after a warm-up; the longest gap is that
of all runs. llama.cpp's towers are measured in each type of `PROJECTORS`, and the fastest counts. "Same token" is the
share of runs in which both choose the same first token. `DECODED` tokens after it give the speed of decoding.

A run keeps the rows of other shapes, weights and images that are on the page.

The first run of a shape writes its checkpoint and GGUF files below `--folder`, for minutes. By estimate these are 24 GB
for gemma-3-4b-vl and qwen3.5-4b-vl, 11 GB for qwen3-vl-2b and 3 GB for smolvlm-500m. In bf16, the two large ones need
20 GB of memory.

For llama.cpp: `pip install llama-cpp-python` in any environment, and the unpacked source archive of the same version
(`pip download --no-deps --no-binary :all: llama-cpp-python`), whose converter writes the GGUF files. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison.worker import Worker  # noqa: E402
from benchmarks.image_costs.checkpoint import (  # noqa: E402
    NAMES,
    TINY_NAMES,
    ensure_checkpoint,
    ensure_gguf,
    family_of,
    sizes_of,
    write_image,
)
from pace import _C  # noqa: E402
from pace.server.options import ServeOptions  # noqa: E402

SCRIPT = "benchmarks/images.py"
MODULE = "benchmarks.image_costs.worker"
WEIGHTS = {"bf16": ("bfloat16", None), "q8_0": ("bfloat16", "q8_0"), "f32": ("float32", None)}
"""Type of llama.cpp's text model -> dtype and quantization of pace."""
PROJECTORS = {"bf16": ("bf16", "f16"), "q8_0": ("q8_0", "f16"), "f32": ("f32",)}
"""Types of llama.cpp's towers, for each type of its text model."""
NEAR = 1.25
"""A tower of llama.cpp is left out if its warm-up takes more than this many times that of the fastest."""
DECODED = 32
"""Tokens after the first that give the speed of decoding."""
PACE = "pace"
KEYS = 3
"""Cells that name a row: shape, weights and image."""
LEAST_GAP, SHARE = 0.25, 0.2
"""A stream may wait this many seconds while an image is encoded, or this share of the encoding, whichever is more."""

Rows = list[dict[str, Any]]


class Images:
    """A new image at each call."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def new(self, size: tuple[int, int]) -> str:
        self.count += 1
        return str(write_image(self.folder / "image.png", *size, seed=self.count))


def pace_worker(checkpoint: Path, weights: str, options: argparse.Namespace) -> Worker:
    dtype, quantization = WEIGHTS[weights]
    worker = Worker("pace", log=options.log, module=MODULE)
    worker.ask("load", checkpoint=str(checkpoint), dtype=dtype, quantization=quantization, threads=options.threads,
               max_tokens=ServeOptions.max_image_tokens)  # fmt: skip
    return worker


def chosen_sizes(shape: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    return options.sizes or list(sizes_of(shape))[: options.num_sizes]


def gaps(shape: str, checkpoint: Path, images: Images, options: argparse.Namespace) -> Rows:
    """Measures the longest gaps of a stream while the largest image is encoded."""
    rows, sizes = [], chosen_sizes(shape, options)
    for weights in options.weights:
        with pace_worker(checkpoint, weights, options) as worker:
            size = sizes[-1]
            worker.ask("answer", image=images.new(sizes[0]))
            alone = [worker.ask("answer", image=images.new(size)) for _ in range(options.rounds)]
            runs = [worker.ask("gaps", image=images.new(size)) for _ in range(options.rounds)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row["gap_in_encoding_s"] = max(run["gap_in_encoding_s"] for run in runs)
        row["encode_alone_s"] = statistics.median(run["encode_s"] for run in alone)
        row["bound_s"] = max(LEAST_GAP, SHARE * row["encode_alone_s"])
        rows.append({**named(shape, weights, size), "tokens": alone[0]["tokens"], **row})
    return rows


def answers(shape: str, checkpoint: Path, images: Images, options: argparse.Namespace) -> Rows:
    """Measures the time from the file of an image to the first token, and the speed after it, in turns."""
    rows = []
    for weights in options.weights:
        source = options.llama_source / "vendor" / "llama.cpp"
        text = ensure_gguf(checkpoint, source, weights, False)
        towers = {kind: str(ensure_gguf(checkpoint, source, kind, True)) for kind in PROJECTORS[weights]}
        with (
            pace_worker(checkpoint, weights, options) as pace,
            Worker("llama.cpp", options.llama_python, log=options.log, module=MODULE) as llama,
        ):
            llama.ask("load", text=str(text), projectors=list(towers.values()), threads=options.threads,
                      around=family_of(shape).around)  # fmt: skip
            for size in chosen_sizes(shape, options):
                runs = turns(pace, llama, list(towers), lambda size=size: images.new(size), options.rounds)
                rows.append({**named(shape, weights, size), **summary(runs)})
                print(answer_line(rows[-1]), file=sys.stderr, flush=True)
    return rows


def turns(pace: Worker, llama: Worker, towers: list[str], new_image: Callable[[], str], rounds: int) -> Rows:
    """Runs of both in turns, after a warm-up. The peer of a run is PACE, or the type of llama.cpp's tower."""
    image = new_image()
    pace.ask("answer", image=image)
    warm = [llama.ask("answer", image=image, tower=tower)["seconds"] for tower in range(len(towers))]
    kept = [tower for tower, seconds in enumerate(warm) if seconds <= NEAR * min(warm)]
    runs: Rows = []
    for _ in range(rounds):
        image = new_image()
        runs.append({"peer": PACE, **pace.ask("answer", image=image, num_decoded=DECODED)})
        for tower in kept:
            decoded = DECODED if tower == kept[0] else 0
            runs.append({"peer": towers[tower], **llama.ask("answer", image=image, tower=tower, num_decoded=decoded)})
    return runs


def summary(runs: Rows) -> dict[str, Any]:
    """Medians of pace, and of llama.cpp with its fastest tower."""
    of = lambda peer, name: [run[name] for run in runs if run["peer"] == peer]
    peers = {run["peer"] for run in runs} - {PACE}
    best = min(peers, key=lambda peer: statistics.median(of(peer, "seconds")))
    counts = {run["tokens"] for run in runs}
    if len(counts) > 1:
        raise RuntimeError(f"the runtimes make different numbers of tokens of the same prompt: {sorted(counts)}")
    median = lambda peer, name: statistics.median(of(peer, name))
    rates = [[run["rate"] for run in runs if run["rate"] and (run["peer"] == PACE) == ours] for ours in (True, False)]
    return {
        "tokens": counts.pop(),
        "pace_s": median(PACE, "seconds"), "pace_encode_s": median(PACE, "encode_s"),
        "llama_s": median(best, "seconds"), "llama_encode_s": median(best, "encode_s"), "llama_tower": best,
        "ratio": statistics.median(theirs / ours for ours, theirs in zip(of(PACE, "seconds"), of(best, "seconds"))),
        "same_tokens": sum(map(int.__eq__, of(PACE, "token"), of(best, "token"))) / len(of(PACE, "token")),
        "pace_rate": statistics.median(rates[0]), "llama_rate": statistics.median(rates[1]),
        "rate_ratio": statistics.median(ours / theirs for ours, theirs in zip(*rates)),
    }  # fmt: skip


def named(shape: str, weights: str, size: tuple[int, int]) -> dict[str, Any]:
    return {"shape": shape, "weights": weights, "image": "{} x {}".format(*size)}


def gap_line(row: dict[str, Any]) -> str:
    return (
        f"| {row['shape']} | {row['weights']} | {row['image']} | {row['tokens']:,} | {row['encode_alone_s']:.2f} s | "
        f"{row['encode_wall_s']:.2f} s | **{row['gap_in_encoding_s']:.3f} s** | {row['bound_s']:.3f} s | "
        f"{row['gap_before_s']:.3f} s | {row['gap_after_s']:.3f} s |"
    )


def answer_line(row: dict[str, Any]) -> str:
    return (
        f"| {row['shape']} | {row['weights']} | {row['image']} | {row['tokens']:,} | {row['pace_s']:.2f} s "
        f"({row['pace_encode_s']:.2f}) | {row['llama_s']:.2f} s ({row['llama_encode_s']:.2f}) | "
        f"{row['llama_tower']} | **{row['ratio']:.2f}** | {row['same_tokens']:.0%} | {row['pace_rate']:.1f} | "
        f"{row['llama_rate']:.1f} | **{row['rate_ratio']:.2f}** |"
    )


class Part(NamedTuple):
    """A measurement and its table."""

    measure: Callable[[str, Path, Images, argparse.Namespace], Rows]
    head: str
    line: Callable[[dict[str, Any]], str]

    def table(self, rows: Rows, earlier: dict[tuple[str, ...], str]) -> str:
        """The table of new and earlier rows. A new row replaces the earlier one of the same name."""
        new = {(row["shape"], row["weights"], row["image"]): self.line(row) for row in rows}
        return "\n".join([self.head, "|---" * (self.head.count("|") - 1) + "|", *(earlier | new).values(), ""])


PARTS = {
    "gaps": Part(
        gaps,
        "| shape | weights | image | tokens | encoding, alone | next to a stream | longest gap in it | allowed | "
        "gap before | after |",
        gap_line,
    ),
    "first-token": Part(
        answers,
        "| shape | weights | image | tokens | first token, pace (encoding) | llama.cpp (encoding) | its tower | "
        "ratio | same token | decoding, pace | llama.cpp | ratio |",
        answer_line,
    ),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = [*NAMES, *TINY_NAMES, "tiny"]
    parser.add_argument("--shapes", "--shape", nargs="+", choices=shapes, metavar="SHAPE", default=["qwen3-vl-2b"],
                        help=f"of {', '.join(NAMES)}, or tiny for small ones of all")  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["bf16", "q8_0"], help="default: bf16 q8_0")
    size = lambda text: tuple(map(int, text.split("x")))
    parser.add_argument("--sizes", nargs="+", type=size, metavar="WxH", help="default: those of the shape's family")
    parser.add_argument("--num-sizes", type=int, metavar="N", help="only the first of the family's (default: all)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="medians are over so many (default: 3)")
    parser.add_argument("--threads", type=int, default=_C.cpu_info()["default_threads"], metavar="N")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "images", help="where models are kept")
    parser.add_argument("--llama-python", metavar="PATH", help="a python that has llama_cpp")
    parser.add_argument(
        "--llama-source", type=Path, metavar="PATH", help="the unpacked source archive of llama-cpp-python"
    )
    parser.add_argument("--log", type=Path, metavar="PATH", help="where the processes write what they log")
    page.add_into_argument(parser)
    options = parser.parse_args()
    options.shapes = [name for shape in options.shapes for name in (TINY_NAMES if shape == "tiny" else [shape])]
    if "first-token" in options.parts and not (options.llama_python and options.llama_source):
        parser.error("--parts first-token needs --llama-python and --llama-source")
    return options


def main() -> int:
    options = parse()
    page.check_page(options.into, SCRIPT)
    report: dict[str, Rows] = {part: [] for part in options.parts}
    with tempfile.TemporaryDirectory() as folder:
        images = Images(Path(folder))
        for shape in options.shapes:
            checkpoint = ensure_checkpoint(shape, options.folder)
            for part, rows in report.items():
                rows += PARTS[part].measure(shape, checkpoint, images, options)
    lines = [
        f"`{page.command(SCRIPT)}` on `{_C.isa()}` with {options.threads} threads; rows that this command does not "
        "name are of an earlier one.\n"
    ]
    for name, part in PARTS.items():
        rows, earlier = report.get(name, []), page.earlier_rows(options.into, SCRIPT, KEYS, part.head)
        lines += [part.table(rows, earlier)] if rows or earlier else []
    page.publish(options.into, SCRIPT, "\n".join(lines) + "\n", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
