"""`pace batch IN.jsonl OUT.jsonl`: answers a file of requests in OpenAI's batch form with a model in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pace.cli import EXIT_FAILED
from pace.cli.arguments import add_model_arguments, count, load_arguments
from pace.naming import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'A line of IN is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, or the '
        "same for /v1/completions. A line of OUT has its custom_id, and its response or error. A run after a stopped "
        "one continues: lines that OUT has are not computed again. Delete the failed lines of OUT to try them "
        "again. The "
        "exit code is 1 if any line failed."
    )
    add_model_arguments(parser)
    parser.add_argument("input", metavar="IN.jsonl", help="the file of requests; `-` for stdin")
    parser.add_argument(
        "output",
        metavar="OUT.jsonl",
        help="the file of results; `-` for stdout, from which a later run cannot continue",
    )
    parser.add_argument(
        "--max-concurrency",
        type=count,
        metavar="N",
        help="maximum number of requests at once (default: twice the number that run in a step)",
    )
    parser.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name of the model in requests; may be given several times (default: the last part of its path, or its "
        "Hub id)",
    )
    parser.add_argument(
        "--any-model-name",
        action="store_true",
        help="answer requests for any model with this one, under the name in the request",
    )
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        from pace.server.batch.answering import Answering, batch_options
    except ModuleNotFoundError as error:
        if error.name not in ("pydantic", "prometheus_client"):
            raise
        raise ImportError(f'pace batch needs {error.name}: pip install "pace-llm[serve]"') from None
    from pace.llm.loading.options import LoadOptions
    from pace.server.batch.results import Results
    from pace.server.service import Service

    with ExitStack() as stack:
        lines = stack.enter_context(_open_input(arguments))
        num_lines = lines.check()
        results = stack.enter_context(
            Results.to(os.dup(sys.stdout.fileno())) if arguments.output == "-" else Results.open(Path(arguments.output))
        )
        num_done = sum(results.has(line) for line in lines)
        num_failed = sum(results.has_failed(line) for line in lines)
        before = f"{num_done - num_failed} answered and {num_failed} failed before"
        if num_done == num_lines:
            print(f"pace: nothing to do: {before}", file=sys.stderr)
            return EXIT_FAILED if num_failed else 0
        load = LoadOptions(**load_arguments(arguments))
        options = batch_options(arguments.model, arguments.served_model_name or (), arguments.any_model_name)
        service = Service(options, load)
        stack.callback(service.close)
        service.load()
        most = arguments.max_concurrency or 2 * service.generator.engine.scheduler.max_sequences_per_step
        answering = Answering(service)
        counts = asyncio.run(_run(lines, answering, results, most, num_lines, num_done))
    before = f"; {before}" if num_done else ""
    print(f"pace: {counted(counts.answered, 'request')} answered, {counts.failed} failed{before}", file=sys.stderr)
    return EXIT_FAILED if num_failed + counts.failed else 0


async def _run(lines: Any, answering: Any, results: Any, most: int, num_lines: int, num_done: int) -> Any:
    from tqdm import tqdm

    from pace.server.batch.run import run as run_batch

    with tqdm(total=num_lines, initial=num_done, unit="request", disable=not sys.stderr.isatty()) as bar:
        return await run_batch(lines, answering, results, most, bar.update)


def _open_input(arguments: argparse.Namespace) -> Any:
    from pace.server.batch.lines import BatchInput

    if arguments.input == "-":
        return BatchInput.spool(sys.stdin.buffer)
    lines = BatchInput.open(Path(arguments.input))
    if os.path.exists(arguments.output) and os.path.samefile(arguments.input, arguments.output):
        arguments.parser.error(f"{arguments.output}: this is the file of requests; give another one for the results")
    return lines
