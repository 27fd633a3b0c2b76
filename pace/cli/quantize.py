"""`pace quantize`: quantises a checkpoint of floats, calibrated on a text, and reports the loss of quality."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pace.cli.arguments import (
    TOKENIZER_HELP,
    add_hub_arguments,
    add_matrix_arguments,
    add_model_argument,
    add_threads_argument,
    count,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, None, help="a checkpoint with float weights: a directory or a Hub id")
    parser.set_defaults(parser=parser)
    parser.add_argument("out", metavar="OUT", help="the directory to write; it must not exist yet")
    parser.add_argument(
        "--format", default="int4", metavar="NAME", help="format of the weights: int4 (default) or int8"
    )
    parser.add_argument(
        "--group",
        type=count,
        metavar="N",
        help="number of weights that share a scale, a multiple of 16 (default: 64 for int4, a whole row for int8)",
    )
    add_matrix_arguments(parser, "auto")
    parser.add_argument(
        "--adapter", metavar="PATH", help="a LoRA adapter that is merged into the weights before they are rounded"
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help='a text like those that the model will read; in a .jsonl file, each line is one text: {"text": "..."}',
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="awq+gptq (default for int4), smoothquant (default for int8), smoothquant+gptq, gptq, awq, or rtn, which "
        "needs no text and is the one for encoders (docs/quantization.md)",
    )
    parser.add_argument(
        "--act-order",
        action=argparse.BooleanOptionalAction,
        help="with gptq: round the columns with the largest inputs first (default), or in their order",
    )
    parser.add_argument(
        "--keep",
        dest="overrides",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules that stay floats, such as *.down_proj or lm_head; may be given several times",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="N",
        help="tokens of the text that the model reads at once (default: 512, or its maximum)",
    )
    parser.add_argument(
        "--tokens", dest="max_tokens", type=count, metavar="N", help="number of tokens to calibrate on (default: 32768)"
    )
    parser.add_argument(
        "--no-report",
        dest="report",
        action="store_false",
        help="do not compare the quality of the result with bfloat16",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_threads_argument(parser, None)
    parser.add_argument("--tokenizer", dest="tokenizer_name_or_path", metavar="PATH_OR_HUB_ID", help=TOKENIZER_HELP)
    add_hub_arguments(parser, None)


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        arguments.parser.error("give two paths: the model, and the result")
    from pace.calibrate import quantize_checkpoint
    from pace.eval import read_texts
    from pace.quant import QuantizationConfig

    options = {"group": arguments.group} if arguments.group else {}
    options |= {"lm_head": arguments.lm_head, "embedding": arguments.embedding}
    report = quantize_checkpoint(
        arguments.model,
        arguments.out,
        QuantizationConfig(arguments.format, overrides=dict.fromkeys(arguments.overrides), **options),
        None if arguments.calibrate is None else read_texts(arguments.calibrate),
        method=arguments.method,
        act_order=arguments.act_order,
        context=arguments.context,
        max_tokens=arguments.max_tokens,
        tokenizer_name_or_path=arguments.tokenizer_name_or_path,
        num_threads=arguments.num_threads,
        revision=arguments.revision,
        cache_dir=arguments.cache_dir,
        local_files_only=arguments.local_files_only,
        report=arguments.report,
        adapter=arguments.adapter,
    )
    print(json.dumps({**asdict(report), "out": str(report.out)}) if arguments.json else report)
    return 0
