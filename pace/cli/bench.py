"""`pace bench`: measures how fast a model runs here and compares it with the limits of the machine; with `--serve`,
measures how fast a server answers."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pace.cli import bench_serving
from pace.cli.arguments import (
    DTYPE_HELP,
    MODEL_HELP,
    add_backend_argument,
    add_kv_cache_dtype_argument,
    add_model_argument,
    add_quantization_argument,
    add_threads_argument,
    add_with_aliases,
    count,
)
from pace.cli.options_in_messages import option, refuse_given
from pace.llm.aliases import MODEL

OPTIONS_HERE = ["list", "dtype", "quantization", "kv_cache_dtype", "prompt", "context", "generate", "batch", "repeats"]
OPTIONS_HERE += ["num_threads", "backend", "profile", "layers", "image_tokens"]
"""Options that do not apply to `--serve`."""
OF_GENERATION = ["kv_cache_dtype", "context", "generate", "profile", "plot", "layers", "image_tokens"]
"""Options that do not apply to an encoder. `--prompt` is the number of tokens of its texts, `--batch` of texts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(
        parser, None, "MODEL_OR_SHAPE", f"{MODEL_HELP}; or a known shape, which is run with random weights (--list)"
    )
    parser.add_argument("--list", action="store_true", help="list the known shapes")
    add_with_aliases(parser, "dtype", MODEL, default="bfloat16", metavar="DTYPE", help=DTYPE_HELP)
    parser.add_argument(
        "--layers",
        type=count,
        metavar="N",
        help="run only the first N layers of a shape, if all do not fit this machine",
    )
    add_quantization_argument(parser, None)
    add_kv_cache_dtype_argument(parser, "auto")
    parser.add_argument(
        "--prompt",
        type=count,
        default=512,
        metavar="N",
        help="length of the prompt in tokens (default: 512); decode follows it, unless --context is given",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="N",
        help="decode with N tokens in the cache of each sequence, filled with random numbers instead of a computed "
        "prompt",
    )
    parser.add_argument("--generate", type=count, default=64, metavar="N", help="decode steps (default: 64)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences decoded at once (default: 1)")
    parser.add_argument(
        "--repeats", type=count, default=5, metavar="N", help="number of runs; the result is their median (default: 5)"
    )
    parser.add_argument(
        "--image-tokens",
        type=count,
        metavar="N",
        help="also load the towers, and time the encoding of an image of N tokens, and of a clip of a minute at most",
    )
    add_threads_argument(parser, None)
    add_backend_argument(parser, "native")
    parser.add_argument("--profile", action="store_true", help="also print the time of each kind of instruction")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="draw the roofline of this machine with the model on it, and the time of each kind of instruction",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    bench_serving.add_arguments(parser)
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    _check_sides(arguments)
    if arguments.serve:
        return bench_serving.run(arguments)

    from pace.bench import measure, plots, report
    from pace.bench.shapes import SHAPES

    if arguments.list:
        print("\n".join(SHAPES))
        return 0
    if arguments.model is None:
        arguments.parser.error("no model to measure: give a checkpoint, or a shape of `pace bench --list`")
    if arguments.json and arguments.profile:
        arguments.parser.error("--json only has the numbers of the table: leave out --profile")
    if arguments.plot:
        plots.check_plot(arguments.plot)
    if arguments.model not in SHAPES and (found := _encoder(arguments.model)) is not None:
        return _bench_encoder(arguments, found)
    subject = measure.load(
        arguments.model,
        arguments.dtype,
        arguments.backend,
        arguments.num_threads,
        arguments.kv_cache_dtype,
        arguments.quantization,
        arguments.layers,
        arguments.image_tokens is not None,
    )
    asked = arguments.prompt, arguments.generate, arguments.batch, arguments.repeats, arguments.context
    result = measure.measure(subject, *asked, arguments.image_tokens)
    if arguments.json:
        print(json.dumps(_rounded(result.as_dict())), flush=True)
    else:
        print(report.table(result) + (f"\n\n{report.profile(result)}" if arguments.profile else ""), flush=True)
    if arguments.plot:
        report.plot(result, arguments.plot)
    return 0


def _encoder(model: str) -> Path | None:
    """The directory or file of an encoder; None for any other model."""
    from pace.bench.shapes import hint_of_shape
    from pace.llm.loading.checkpoint import Checkpoint
    from pace.llm.loading.find import find_checkpoint
    from pace.llm.models.encoders.encoder_list import find_encoder

    with hint_of_shape(model):
        found = find_checkpoint(model)
    return None if find_encoder(Checkpoint(found).config) is None else found


def _bench_encoder(arguments: argparse.Namespace, path: Path) -> int:
    from pace.bench import encoders

    refuse_given(arguments, OF_GENERATION, "an encoder, which generates nothing")
    subject = encoders.load(path, arguments.dtype, arguments.backend, arguments.num_threads, arguments.quantization)
    result = encoders.measure(subject, arguments.prompt, arguments.batch, arguments.repeats)
    print(json.dumps(_rounded(result.as_dict())) if arguments.json else result.table(), flush=True)
    return 0


def _check_sides(arguments: argparse.Namespace) -> None:
    """Exits with a usage error if options of a model that runs here are combined with `--serve`, or the reverse."""
    parser = arguments.parser
    here = [name for name in OPTIONS_HERE if getattr(arguments, name) != parser.get_default(name)]
    there = [name for name in bench_serving.OPTIONS if name in arguments]
    if arguments.serve and here:
        parser.error(f"{option(parser, here[0])} only applies to a model in this process: leave it out with --serve")
    if not arguments.serve and there:
        parser.error(f"{option(parser, there[0])} needs --serve URL: it only applies to the load on a server")


def _rounded(numbers: dict[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.5g}")
        if isinstance(value, float)
        else _rounded(value)
        if isinstance(value, dict)
        else value
        for key, value in numbers.items()
    }
