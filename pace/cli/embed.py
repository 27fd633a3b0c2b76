"""`pace embed`: prints the vectors of texts, or ranks texts by a query."""

from __future__ import annotations

import argparse
import json
import os
import sys

from pace.cli.arguments import add_loading_arguments, add_model_argument, count, load_arguments

OF_MEDIA = {"media_cache_bytes", "mmproj"}
"""Options for loading that have no use here."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add_model_argument(group, help="a model: an encoder, a reranker or a causal model, as for other commands")
    add_loading_arguments(group)
    parser.add_argument(
        "texts", nargs="*", metavar="TEXT", help="the texts; without any, the lines of --file or of stdin"
    )
    parser.add_argument("--file", metavar="FILE", help="a file with one text a line")
    parser.add_argument("--prompt", metavar="NAME", help="name of the prompt that is put before each text")
    parser.add_argument("--task", metavar="NAME", help="name of the task whose adapter the model has")
    parser.add_argument(
        "--adapter",
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="a LoRA adapter that is merged into the weights: a directory that PEFT has saved, or a .gguf file",
    )
    parser.add_argument("--dimensions", type=count, metavar="N", help="keep the first N numbers of a vector")
    parser.add_argument(
        "--rank", metavar="QUERY", help="print scores of the texts, best first, in place of vectors; needs a reranker"
    )
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.texts and arguments.file is not None:
        arguments.parser.error("texts are given twice, as arguments and by --file; give them once")
    if arguments.file is not None and not os.path.isfile(arguments.file):
        arguments.parser.error(f"there is no file {arguments.file}")
    of_vectors = (arguments.prompt, arguments.task, arguments.dimensions)
    if arguments.rank is not None and any(given is not None for given in of_vectors):
        arguments.parser.error("--rank prints scores, which have no --prompt, --task or --dimensions")
    texts = arguments.texts or _lines(arguments.file)
    model = _open(arguments)
    if arguments.rank is not None:
        for index, score in model.rank(arguments.rank, texts, truncate=True):
            _print({"index": index, "score": score, "text": texts[index]})
        return 0
    vectors = model.embed(texts, arguments.prompt, arguments.dimensions, task=arguments.task)
    for index, vector in enumerate(vectors.numpy()):
        _print({"index": index, "embedding": [float(str(number)) for number in vector]})
    return 0


def _lines(file: str | None) -> list[str]:
    """The lines of a file, or of stdin, without empty ones."""
    if file is None and sys.stdin.isatty():
        raise ValueError("no texts; give them as arguments, by --file, or on stdin, one a line")
    if file is None:
        data = sys.stdin.buffer.read()
    else:
        with open(file, "rb") as opened:
            data = opened.read()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the texts are not UTF-8: {error}") from None
    return [line for line in text.splitlines() if line.strip()]


def _open(arguments: argparse.Namespace):
    """Loads the model; without --dtype, in that of its config."""
    from pace.llm import EmbeddingModel
    from pace.llm.loading.options import LoadOptions

    options = load_arguments(arguments)
    for name in OF_MEDIA & options.keys():
        arguments.parser.error(f"--{name.replace('_', '-')} is for images and sound, and pace embed reads only texts")
    return EmbeddingModel._open(LoadOptions(**options), keeps_dtype="dtype" not in arguments)


def _print(line: dict) -> None:
    print(json.dumps(line, ensure_ascii=False))
