"""`pace bench --serve URL`: measures a pace server, or another that speaks OpenAI's protocol, under load."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from pace import env
from pace.bench.serving.metrics import GOALS, METRICS, details, summary
from pace.bench.serving.workload import ENDPOINTS, Load
from pace.cli.arguments import count

DEFAULTS: dict[str, Any] = {
    "num_warmups": 1,
    "timeout": 600.0,
    "goodput": None,
    "percentile_metrics": list(METRICS),
    "metric_percentiles": [90.0, 99.0],
    "save_result": None,
    "save_detailed": False,
}
"""Defaults of the options that are not fields of Load."""
OPTIONS = [*DEFAULTS, *(field.name for field in fields(Load))]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options. One that is not given is absent from the parsed arguments."""
    group = parser.add_argument_group(
        "load on a server (--serve)",
        "MODEL is the model's name on the server (default: the first in its list), and OPENAI_API_KEY its key; "
        "of the options above, only --plot and --json apply",
    )
    group.add_argument(
        "--serve", metavar="URL", help="measure the server at this address, such as http://127.0.0.1:8000"
    )

    def add(name: str, help: str, **reader: Any) -> None:
        group.add_argument(name, default=argparse.SUPPRESS, help=help, **reader)

    add("--endpoint", f"path of the requests: {' (default) or '.join(ENDPOINTS)}", choices=ENDPOINTS, metavar="PATH")
    add("--num-prompts", "number of requests (default: 100)", type=count, metavar="N")
    add("--input-len", "words of a prompt, about as many tokens (default: 128)", type=count, metavar="N")
    add("--output-len", "maximum tokens of an answer (default: 64)", type=count, metavar="N")
    add(
        "--range-ratio",
        "spread both lengths from 1 - X to 1 + X times their value (default: 0)",
        type=float,
        metavar="X",
    )
    add("--request-rate", "requests per second, at random times (default: inf)", type=float, metavar="X")
    add(
        "--burstiness",
        "randomness of these times: 1 for a Poisson process (default), less for bursts",
        type=float,
        metavar="X",
    )
    add("--max-concurrency", "maximum number of requests at once (default: no limit)", type=count, metavar="N")
    add(
        "--seed",
        "seed of prompts, lengths and times; another one gives prompts that the server has not cached",
        type=int,
        metavar="N",
    )
    add("--ignore-eos", "let every answer reach its maximum length", action="store_true")
    add("--extra-body", "more fields of each request, such as '{\"top_k\": 20}'", type=_json_object, metavar="JSON")
    add("--num-warmups", "requests before the measured ones (default: 1)", type=_whole, metavar="N")
    add("--timeout", "seconds after which a request counts as failed (default: 600)", type=_positive, metavar="X")
    add(
        "--goodput",
        "also count the requests that meet these limits in milliseconds, such as ttft:2000 tpot:100 "
        f"({', '.join(GOALS)})",
        nargs="+",
        type=_goal,
        metavar="NAME:MS",
    )
    add(
        "--percentile-metrics",
        f"metrics with percentiles (default: {','.join(METRICS)})",
        type=_metrics,
        metavar="NAMES",
    )
    add("--metric-percentiles", "percentiles to report (default: 90,99)", type=_percentiles, metavar="NUMBERS")
    add("--save-result", "also write the result to this file, as JSON", type=Path, metavar="FILE")
    add("--save-detailed", "with --save-result: also the times of each request", action="store_true")


def run(arguments: argparse.Namespace) -> int:
    from pace.bench.plots import check_plot, check_writable
    from pace.bench.serving import report
    from pace.bench.serving.http import Address

    given = DEFAULTS | {name: value for name, value in vars(arguments).items() if name in OPTIONS}
    goodput = dict(given["goodput"] or ())
    try:
        load = Load(**{name: value for name, value in given.items() if name not in DEFAULTS})
        address = Address.parse(arguments.serve)
        if given["save_detailed"] and not given["save_result"]:
            raise ValueError("save_detailed needs --save-result, because the lists are only written to a file")
    except ValueError as error:
        arguments.parser.error(str(error))
    if arguments.plot:
        check_plot(arguments.plot)
    if given["save_result"]:
        check_writable(given["save_result"], "--save-result")

    model, result = asyncio.run(_measure(address, load, arguments.model, given["num_warmups"], given["timeout"]))
    metrics, percentiles = given["percentile_metrics"], given["metric_percentiles"]
    numbers = summary(result, load, model, metrics, percentiles, goodput)
    rounded = {key: float(f"{x:.6g}") if isinstance(x, float) else x for key, x in numbers.items()}
    table = report.table(numbers, result, load, percentiles, goodput)
    print(json.dumps(rounded) if arguments.json else table, flush=True)
    if given["save_result"]:
        saved = numbers | details(result) if given["save_detailed"] else numbers
        given["save_result"].write_text(json.dumps(saved) + "\n", encoding="utf-8")
    if arguments.plot:
        report.plot(result, load, arguments.plot)
    return 0 if numbers["completed"] else 1


async def _measure(address: Any, load: Load, model: str | None, num_warmups: int, timeout: float) -> tuple[str, Any]:
    from tqdm import tqdm

    from pace.bench.serving import run as serving
    from pace.bench.serving.http import Client

    client = Client(address, env.value("OPENAI_API_KEY"))
    try:
        model = model or await serving.find_model(client)
        bodies = load.bodies(model, num_warmups)
        await serving.warm_up(client, load, bodies[:num_warmups], timeout)
        with tqdm(total=load.num_prompts, unit="request", leave=False, disable=not sys.stderr.isatty()) as bar:
            return model, await serving.run(client, load, bodies[num_warmups:], timeout, bar.update)
    finally:
        client.close()


# -- how options are read ----------------------------------------------------------------------------------------------


def _goal(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name in GOALS and float(limit) > 0:
            return name, float(limit)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} must be {', '.join(GOALS)} with milliseconds, such as ttft:2000")


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= share <= 100 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers from 0 to 100, such as 50,99,99.9")
    return shares


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object, such as '{{\"top_k\": 20}}'")
    return value


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0; got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number more than 0; got {text!r}")
    return number
