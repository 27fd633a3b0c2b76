"""`pace eval`: measures how well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pace.cli.arguments import add_loading_arguments, add_model_argument, count, open_llm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument(
        "--text",
        required=True,
        metavar="FILE",
        help='a text file; in a .jsonl file, each line is one text: {"text": "..."}',
    )
    parser.add_argument(
        "--against",
        metavar="DTYPE_OR_MODEL",
        help="compare with bf16, fp16 or fp32 weights of the same checkpoint, or with another model of the same "
        "tokenizer",
    )
    parser.add_argument(
        "--context", type=count, metavar="N", help="tokens that the model reads at once (default: 512, or its maximum)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_loading_arguments(
        parser.add_argument_group("loading", "dtypes and quantisation apply to MODEL, not to what it is compared with")
    )


def run(arguments: argparse.Namespace) -> int:
    from pace.eval import evaluate, read_texts

    texts = read_texts(arguments.text)
    model, reference = open_llm(arguments), _load_reference(arguments)
    result = evaluate(model, texts, reference, arguments.context)
    if arguments.json:
        told = {"model": arguments.model, "held_as": model.held_as, "against": arguments.against}
        print(json.dumps(told | asdict(result)))
    else:
        print(f"{'model':<20}{arguments.model}, {model.held_as}\n{result}")
    return 0


def _load_reference(arguments: argparse.Namespace):
    from pace.eval import is_quantized
    from pace.llm.loading.options import DTYPES

    if arguments.against is None:
        return None
    plain = {"quantization": None, "kv_cache_dtype": "auto"}
    if arguments.against in DTYPES:
        reference = open_llm(arguments, dtype=arguments.against, **plain)
        if is_quantized(reference):
            raise ValueError(
                f"{arguments.model} is quantised as it is stored, so --against {arguments.against} would compare it "
                "with itself; give the original checkpoint"
            )
        return reference
    return open_llm(
        arguments,
        model=arguments.against,
        dtype="bfloat16",
        tokenizer_name_or_path=None,
        revision=None,
        mmproj=None,
        **plain,
    )
