"""Measures images of a Qwen3-VL with random weights: what an encoding costs other streams, and the time to the first
token next to llama.cpp's mtmd.

    python benchmarks/images.py --parts gaps                            # About 15 minutes for a Qwen3-VL-2B.
    python benchmarks/images.py --llama-python PATH --llama-source PATH --into benchmarks/RESULTS.md   # An hour.
    python benchmarks/images.py --shape tiny --parts gaps --sizes 256x256 640x480 --rounds 1

Both runtimes are processes that keep their models and take turns. Each run has another image, a PNG whose sides need no
resizing, so that no cache helps. Each figure is the median of `--rounds` runs after a warm-up; the longest gap is that
of all runs. llama.cpp's towers are measured in each type of `PROJECTORS`, and the fastest counts. "Same token" is the
share of runs in which both choose the same first token.

For llama.cpp: `pip install llama-cpp-python` in any environment, and the unpacked source archive of the same version
(`pip download --no-deps --no-binary :all: llama-cpp-python`), whose converter writes the GGUF files. The last line of
stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison.worker import Worker  # noqa: E402
from benchmarks.image_costs.checkpoint import SHAPES, ensure_checkpoint, ensure_gguf, write_image  # noqa: E402
from pace import _C  # noqa: E402
from pace.server.options import ServeOptions  # noqa: E402

SCRIPT = "benchmarks/images.py"
MODULE = "benchmarks.image_costs.worker"
SIZES = ((640, 480), (1024, 1024), (1280, 1024))
"""Width and height: 300, 1,024 and 1,280 tokens. The last is the most that `pace serve` allows by default."""
WEIGHTS = {"bf16": ("bfloat16", None), "q8_0": ("bfloat16", "q8_0"), "f32": ("float32", None)}
"""Type of llama.cpp's text model -> dtype and quantization of pace."""
PROJECTORS = {"bf16": ("bf16", "f16"), "q8_0": ("q8_0", "f16"), "f32": ("f32",)}
"""Types of llama.cpp's towers, for each type of its text model."""
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


def gaps(checkpoint: Path, images: Images, options: argparse.Namespace) -> Rows:
    """Measures the longest gaps of a stream while the largest image is encoded."""
    rows = []
    for weights in options.weights:
        with pace_worker(checkpoint, weights, options) as worker:
            size = options.sizes[-1]
            worker.ask("first_token", image=images.new(options.sizes[0]))
            alone = [worker.ask("first_token", image=images.new(size)) for _ in range(options.rounds)]
            runs = [worker.ask("gaps", image=images.new(size)) for _ in range(options.rounds)]
        row = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        row["gap_in_encoding_s"] = max(run["gap_in_encoding_s"] for run in runs)
        row["encode_alone_s"] = statistics.median(run["encode_s"] for run in alone)
        row["bound_s"] = max(LEAST_GAP, SHARE * row["encode_alone_s"])
        rows.append({"weights": weights, "tokens": alone[0]["tokens"], **row})
    return rows


def first_tokens(checkpoint: Path, images: Images, options: argparse.Namespace) -> Rows:
    """Measures the time from the file of an image to the first token, in turns."""
    rows = []
    for weights in options.weights:
        source = options.llama_source / "vendor" / "llama.cpp"
        text = ensure_gguf(checkpoint, source, weights, False)
        towers = [ensure_gguf(checkpoint, source, kind, True) for kind in PROJECTORS[weights]]
        with (
            pace_worker(checkpoint, weights, options) as pace,
            Worker("llama.cpp", options.llama_python, log=options.log, module=MODULE) as llama,
        ):
            llama.ask("load", text=str(text), projectors=[str(path) for path in towers], threads=options.threads)
            for width, height in options.sizes:
                runs: Rows = []
                for _ in range(options.rounds + 1):
                    image = images.new((width, height))
                    runs.append({"peer": 0, **pace.ask("first_token", image=image)})
                    for tower in range(len(towers)):
                        runs.append({"peer": 1 + tower, **llama.ask("first_token", image=image, tower=tower)})
                runs = runs[1 + len(towers) :]  # the first round warms up
                rows.append({"weights": weights, "width": width, "height": height})
                rows[-1] |= summary(runs, PROJECTORS[weights])
    return rows


def summary(runs: Rows, projectors: tuple[str, ...]) -> dict[str, Any]:
    """Medians of pace, and of llama.cpp with its fastest tower."""
    of = lambda peer, name: [run[name] for run in runs if run["peer"] == peer]
    peers = {peer: statistics.median(of(peer, "seconds")) for peer in range(1, 1 + len(projectors))}
    best = min(peers, key=peers.__getitem__)
    counts = {run["tokens"] for run in runs}
    if len(counts) > 1:
        raise RuntimeError(f"the runtimes make different numbers of tokens of the same prompt: {sorted(counts)}")
    return {
        "tokens": counts.pop(),
        "pace_s": statistics.median(of(0, "seconds")), "pace_encode_s": statistics.median(of(0, "encode_s")),
        "llama_s": peers[best], "llama_encode_s": statistics.median(of(best, "encode_s")),
        "llama_tower": projectors[best - 1],
        "ratio": statistics.median(theirs / ours for ours, theirs in zip(of(0, "seconds"), of(best, "seconds"))),
        "same_tokens": sum(map(int.__eq__, of(0, "token"), of(best, "token"))) / len(of(0, "token")),
    }  # fmt: skip


def gap_table(rows: Rows) -> Iterator[str]:
    yield "| weights | tokens | encoding, alone | next to a stream | longest gap in it | allowed | gap before | after |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['weights']} | {row['tokens']:,} | {row['encode_alone_s']:.2f} s | {row['encode_wall_s']:.2f} s | "
            f"**{row['gap_in_encoding_s']:.3f} s** | {row['bound_s']:.3f} s | {row['gap_before_s']:.3f} s | "
            f"{row['gap_after_s']:.3f} s |"
        )
    yield ""


def first_token_table(rows: Rows) -> Iterator[str]:
    yield "| weights | image | tokens | pace (encoding) | llama.cpp (encoding) | its tower | ratio | same token |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['weights']} | {row['width']} x {row['height']} | {row['tokens']:,} | {row['pace_s']:.2f} s "
            f"({row['pace_encode_s']:.2f}) | {row['llama_s']:.2f} s ({row['llama_encode_s']:.2f}) | "
            f"{row['llama_tower']} | **{row['ratio']:.2f}** | {row['same_tokens']:.0%} |"
        )
    yield ""


PARTS = {"gaps": (gaps, gap_table), "first-token": (first_tokens, first_token_table)}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-vl-2b", help="default: qwen3-vl-2b")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: both")
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=["bf16", "q8_0"], help="default: bf16 q8_0")
    size = lambda text: tuple(map(int, text.split("x")))
    parser.add_argument("--sizes", nargs="+", type=size, default=list(SIZES), metavar="WxH", help="multiples of 32")
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
    if "first-token" in options.parts and not (options.llama_python and options.llama_source):
        parser.error("--parts first-token needs --llama-python and --llama-source")
    return options


def main() -> int:
    options = parse()
    page.check_page(options.into, SCRIPT)
    checkpoint = ensure_checkpoint(options.shape, options.folder)
    lines, report = [f"`{page.command(SCRIPT)}`: {options.shape}, on `{_C.isa()}`, {options.threads} threads.\n"], {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.parts:
            measure, table = PARTS[part]
            report[part] = measure(checkpoint, Images(Path(folder)), options)
            lines += table(report[part])
    page.publish(options.into, SCRIPT, "\n".join(lines) + "\n", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
