"""`pace eval`: measures how well a model predicts a text, and how far its predictions are from another model's."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from pace.cli.arguments import add_loading_arguments, add_model_argument, count, open_llm, with_matrices


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
    parser.add_argument(
        "--heads",
        nargs="+",
        metavar="FORMAT",
        help="compare LM heads in these formats, such as float int8 q6_k q4_k, next to the same other weights",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    add_loading_arguments(
        parser.add_argument_group("loading", "dtypes and quantisation apply to MODEL, not to what it is compared with")
    )


def run(arguments: argparse.Namespace) -> int:
    from pace.eval import evaluate, read_texts

    texts = read_texts(arguments.text)
    if arguments.heads:
        return _compare_heads(arguments, texts)
    model, reference = open_llm(arguments), _load_reference(arguments)
    result = evaluate(model, texts, reference, arguments.context)
    if arguments.json:
        told = {"model": arguments.model, "held_as": model.held_as, "against": arguments.against}
        print(json.dumps(told | asdict(result)))
    else:
        print(f"{'model':<20}{arguments.model}, {model.held_as}\n{result}")
    return 0


def _compare_heads(arguments: argparse.Namespace, texts: list[str]) -> int:
    """Prints a row for each head of `--heads`, or a JSON object with a list of them."""
    from pace.eval import evaluate
    from pace.quant import read_quantization

    if "lm_head" in arguments:
        raise ValueError("--heads sets the format of the LM head; leave out --lm-head")
    asked = getattr(arguments, "quantization", None)
    configs = [read_quantization(with_matrices(asked, lm_head=head)) for head in arguments.heads]
    reference, rows = _load_reference(arguments), []
    for head, config in zip(arguments.heads, configs):
        with open_llm(arguments, quantization=config) as model:
            report = model.memory_report()
            sizes = {
                "held_as": model.held_as,
                "weight_bytes": sum(report.weights.values()),
                "head": asdict(report.head),
            }
            rows.append(
                {"lm_head": head, **sizes, "share": report.head.share}
                | asdict(evaluate(model, texts, reference, arguments.context))
            )
    if arguments.json:
        print(json.dumps({"model": arguments.model, "against": arguments.against, "heads": rows}))
        return 0
    print(f"{arguments.model}, {rows[0]['held_as']}, {rows[0]['num_tokens']} tokens")
    print(
        f"{'LM head':<12}{'MiB':>10}{'of a token':>12}{'weights MiB':>13}{'perplexity':>12}"
        + (f"{'KL divergence':>15}{'top-1':>10}" if reference else "")
    )
    for row in rows:
        line = (
            f"{row['lm_head']:<12}{row['head']['num_bytes'] / 2**20:>10.2f}{100 * row['share']:>10.0f} %"
            f"{row['weight_bytes'] / 2**20:>13.2f}{row['perplexity']:>12.4f}"
        )
        if reference:
            line += f"{row['kl_divergence']:>15.6f}{100 * row['top1_agreement']:>8.2f} %"
        print(line)
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
