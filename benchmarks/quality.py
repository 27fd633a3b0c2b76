"""Measures the loss of every format of quantised weights, as Markdown and one line of JSON.

The table has bits, bytes, perplexity, KL divergence to bf16 and top-1 agreement.

    python benchmarks/quality.py                                    # The bundled model, some minutes on two cores.
    python benchmarks/quality.py --into docs/quantization.md        # The table goes between its two lines there.
    python benchmarks/quality.py --model PATH --text text.jsonl --calibrate other.jsonl --formats int4

Formats are those of `LLMModel(quantization=...)`. Rows with a method are checkpoints that `pace quantize` writes here,
calibrated on another text.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.page import add_into_argument, check_page, command, publish  # noqa: E402
from pace.assets import TINY  # noqa: E402
from pace.calibrate import quantize_checkpoint  # noqa: E402
from pace.eval import Evaluation, evaluate, read_texts  # noqa: E402
from pace.llm import LLMModel  # noqa: E402

SCRIPT = "benchmarks/quality.py"
HELDOUT, CALIBRATION = (ROOT / "tests" / "data" / name for name in ("tiny_heldout.jsonl", "tiny_calibration.jsonl"))

FORMATS: dict[str, list[dict[str, Any]]] = {
    "int8": [{}],
    "fp8": [{}],
    "mxfp8": [{}],
    "int4": [{"group": 32}, {}, {"group": 128}, {"group": 32, "symmetric": False}],
    "nf4": [{}, {"double_quantization": True}],
    "fp4": [{}],
    "mxfp4": [{}],
    **{f"q{bits}_k": [{}] for bits in (2, 3, 4, 5, 6)},
}
"""Maps a format to the options to compare."""
METHODS = {"int8": ["smoothquant", "smoothquant+gptq"], "int4": ["awq", "gptq", "awq+gptq"]}
"""Methods of `pace quantize`, with the format's default options; `rtn` would give the bits of the format at load."""


@dataclass
class Row:
    format: str
    bits: float
    """Bits of memory per weight of the model, over all matrices and vectors, including padding."""
    weight_bytes: int
    quality: Evaluation


def rows(options: argparse.Namespace) -> Iterator[Row]:
    texts = read_texts(options.text)[: options.texts]
    with LLMModel(options.model) as reference:

        def row(label: str, path: str | Path, **arguments: Any) -> Row:
            say(label)
            with LLMModel(path, **arguments) as model:
                report = model.memory_report()
                num_bytes = sum(report.weights.values())
                return Row(
                    label,
                    8 * num_bytes / sum(report.weight_counts.values()),
                    num_bytes,
                    evaluate(model, texts, reference),
                )

        yield row("fp32", options.model, dtype="float32")
        yield row("bf16", options.model)
        for format in options.formats:
            for more in FORMATS[format]:
                label = ", ".join([format, *(f"{name} {value}" for name, value in more.items())])
                yield row(label, options.model, quantization={"format": format, **more})
            for method in METHODS.get(format, []):
                with tempfile.TemporaryDirectory() as folder:
                    out = Path(folder) / "out"
                    calibration = read_texts(options.calibrate)
                    quantize_checkpoint(options.model, out, format, calibration, method=method, report=False)
                    yield row(f"{format}, `--method {method}`", out)


def markdown(report: dict[str, Any]) -> str:
    lines = [
        (
            f"`{report['command']}`: {report['model']} over {report['num_tokens']} tokens of {report['text']}, "
            f"calibrated on {report['calibrate']}, on `{report['isa']}`. Against the model in bf16."
        ),
        "",
        "| format | bits per weight | MiB | perplexity | KL divergence | largest of a token | top-1 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        found = row["quality"]
        lines.append(
            f"| {row['format']} | {row['bits']:.2f} | {row['weight_bytes'] / 2**20:.2f} | "
            f"{found['perplexity']:.4f} | {found['kl_divergence']:.6f} | {found['kl_max']:.3f} "
            f"| {100 * found['top1_agreement']:.2f} % |"
        )
    return "\n".join(lines) + "\n"


def relative(path: str | Path) -> str:
    path = Path(path).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TINY), help="a checkpoint of floats (default: the bundled model)")
    parser.add_argument(
        "--text",
        default=HELDOUT,
        type=Path,
        metavar="FILE",
        help="what is predicted (default: the bundled model's held-out text)",
    )
    parser.add_argument(
        "--calibrate",
        default=CALIBRATION,
        type=Path,
        metavar="FILE",
        help="what is calibrated on (default: text made as the held-out one, with another seed)",
    )
    parser.add_argument("--texts", type=int, metavar="N", help="only the first N texts of a .jsonl file")
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=list(FORMATS),
        default=list(FORMATS),
        metavar="NAME",
        help=f"some of {', '.join(FORMATS)}",
    )
    add_into_argument(parser)
    options = parser.parse_args()
    check_page(options.into, SCRIPT)

    from pace import _C

    found = list(rows(options))
    report = {
        "command": command(SCRIPT),
        "model": relative(options.model),
        "text": relative(options.text),
        "calibrate": relative(options.calibrate),
        "isa": _C.isa(),
        "num_tokens": found[0].quality.num_tokens,
        "rows": [asdict(row) for row in found],
    }
    publish(options.into, SCRIPT, markdown(report), report)


if __name__ == "__main__":
    main()
