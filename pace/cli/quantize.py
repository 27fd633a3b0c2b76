"""`pace quantize`: quantises a checkpoint of floats, optionally calibrated on a text, and reports the loss of quality."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pace.cli.arguments import add_model_argument, add_threads_argument, count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser, None, help="a checkpoint of floats, path or Hub id")
    parser.set_defaults(parser=parser)
    parser.add_argument("out", metavar="OUT", help="the directory to write, which must not exist yet")
    parser.add_argument("--format", default="int4", metavar="NAME", help="int4 (default) or int8")
    parser.add_argument(
        "--group",
        type=count,
        metavar="N",
        help="weights that share a scale, a multiple of 16 (default: 64 of int4, a row of int8)",
    )
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help='a text like those that the model is for; of a .jsonl file each line is one, {"text": "..."}',
    )
    parser.add_argument(
        "--method",
        metavar="NAME",
        help="rtn, gptq, awq, smoothquant, awq+gptq (default of int4), smoothquant+gptq; of int8: smoothquant",
    )
    parser.add_argument(
        "--act-order",
        action=argparse.BooleanOptionalAction,
        help="gptq rounds the columns with the largest inputs first (default), or in their own order",
    )
    parser.add_argument(
        "--keep",
        dest="overrides",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules to leave as floats, as *.down_proj or lm_head; may be given several times",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="N",
        help="tokens of a window of the text (default: 512, or what the model takes)",
    )
    parser.add_argument(
        "--tokens", dest="max_tokens", type=count, metavar="N", help="of the text to calibrate on (default: 32768)"
    )
    parser.add_argument(
        "--no-report",
        dest="report",
        action="store_false",
        help="do not compare the result with bfloat16 on a part of the text",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    add_threads_argument(parser, None)
    parser.add_argument(
        "--tokenizer", dest="tokenizer_name_or_path", metavar="PATH_OR_HUB_ID", help="where it is not with the model"
    )
    parser.add_argument("--revision", help="branch, tag or commit on the Hub")
    parser.add_argument("--cache-dir", metavar="DIR", help="where downloads are kept")
    parser.add_argument("--local-files-only", action="store_true", help="download nothing")


def run(arguments: argparse.Namespace) -> int:
    if arguments.model is None:
        arguments.parser.error("two paths are needed: that of the model, and that of the result")
    from pace.calibrate import quantize_checkpoint
    from pace.eval import read_texts
    from pace.quant import QuantizationConfig

    options = {"group": arguments.group} if arguments.group else {}
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
    )
    print(json.dumps({**asdict(report), "out": str(report.out)}) if arguments.json else report)
    return 0
