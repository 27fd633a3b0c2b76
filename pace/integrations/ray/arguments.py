"""Arguments of `serve run pace.integrations.ray:app NAME=VALUE ...`: the number of replicas, and the options of `pace
serve` by name (`max_queue=100` for `--max-queue 100`)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from pace.cli import serve
from pace.cli.arguments import load_arguments
from pace.server.models.entries import words_of
from pace.server.options import ServeOptions

SCALING: dict[str, tuple[type, str]] = {
    "num_replicas": (int, "replicas, each with an engine of its own (default: 1)"),
    "min_replicas": (int, "with max_replicas: the fewest that load may leave"),
    "max_replicas": (int, "the most that load may start; instead of num_replicas"),
    "initial_replicas": (int, "how many there are first"),
    "target_ongoing_requests": (float, "requests under way that a replica should have, for more or fewer of them"),
    "upscale_delay_s": (float, "seconds of more load before replicas are added"),
    "downscale_delay_s": (float, "seconds of less load before replicas are removed"),
    "num_ingress_replicas": (int, "processes that choose a replica for each request (default: 1)"),
    "balance": (float, "how far above the average a replica's load may be before others take its conversations"),
}
AUTOSCALING = ("min_replicas", "max_replicas", "initial_replicas", "target_ongoing_requests")
AUTOSCALING += ("upscale_delay_s", "downscale_delay_s")

PROXYS = "header_seconds body_seconds write_seconds max_connections host port uds tls_cert tls_key".split()
"""Options of `pace serve` for connections, which Ray's proxy handles here."""
SEVERAL = ("models", "idle_unload")
"""Options of `pace serve` for several models in one process."""
OF_ONE_REPLICA = ("lora_dir",)
"""Options of `pace serve` with which a client would change the replica that happens to answer it."""
OF_VECTORS = ("task", "dimensions")
BALANCE = 1.25


@dataclass(frozen=True)
class Arguments:
    """Parsed arguments of an application."""

    serve: ServeOptions
    load: dict[str, Any]
    """Fields of `LoadOptions` without `num_threads`, which is the `num_cpus` of a replica."""
    num_threads: int | None
    num_replicas: int
    autoscaling: dict[str, Any] | None
    """Ray's `autoscaling_config`; None to use `num_replicas`."""
    num_ingress_replicas: int
    balance: float


def read_arguments(given: dict[str, Any]) -> Arguments:
    """Parses values from the command line or from YAML. Raises ValueError that names the wrong argument."""
    parser = _parser()
    known = _names(parser)
    for name in given:
        _check_known(name, known)
    found = parser.parse_args([word for name, value in given.items() for word in _words(name, value)])
    scaling = {name: getattr(found, name) for name in SCALING if getattr(found, name) is not None}
    autoscaling = {name: scaling[name] for name in AUTOSCALING if name in scaling}
    if autoscaling and "max_replicas" not in autoscaling:
        raise ValueError(f"{', '.join(autoscaling)} need max_replicas")
    if autoscaling and "num_replicas" in scaling:
        raise ValueError("num_replicas is for a fixed number, max_replicas for one that follows the load: give one")
    for name in ("num_replicas", "max_replicas", "num_ingress_replicas", "balance"):
        if scaling.get(name, 1) < 1:
            raise ValueError(f"{name} must be at least 1; got {scaling[name]:g}")
    load = load_arguments(found)
    return Arguments(
        serve=serve.serve_options(found),
        num_threads=load.pop("num_threads", None),
        load=load,
        num_replicas=scaling.get("num_replicas", 1),
        autoscaling=autoscaling or None,
        num_ingress_replicas=scaling.get("num_ingress_replicas", 1),
        balance=scaling.get("balance", BALANCE),
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument --", "").replace("arguments: --", "arguments: "))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pace.integrations.ray:app", add_help=False, allow_abbrev=False)
    serve.add_arguments(parser)
    for name, (kind, explanation) in SCALING.items():
        parser.add_argument(f"--{_dashed(name)}", type=kind, help=explanation)
    return parser


def _names(parser: argparse.ArgumentParser) -> list[str]:
    """Names of the supported arguments."""
    options = [action.option_strings[0] for action in parser._actions if action.option_strings]
    return ["model", *(option.removeprefix("--").replace("-", "_") for option in options)]


def _check_known(name: str, known: list[str]) -> None:
    if name in PROXYS:
        raise ValueError(f"{name}: Ray's proxy holds the connections; see http_options of Ray Serve")
    if name in SEVERAL:
        raise ValueError(f"{name}: a replica has one model, which stays loaded; make an application for each model")
    if name in OF_ONE_REPLICA:
        raise ValueError(f"{name}: a client would load an adapter into one replica; give adapters for all with lora")
    if name in OF_VECTORS:
        raise ValueError(f"{name}: replicas generate text; serve vectors with `pace serve`")
    if name == "access_log":
        raise ValueError("access_log: Ray Serve has one of its own; see logging_config of Ray Serve")
    if name not in known:
        near = get_close_matches(name, known, 1)
        raise ValueError(f"there is no argument {name}" + (f"; did you mean {near[0]}?" if near else ""))


def _words(name: str, value: Any) -> list[str]:
    """Converts one argument to the command line of `pace serve`."""
    return [str(value)] if name == "model" else words_of(name, value)


def _dashed(name: str) -> str:
    return name.replace("_", "-")
