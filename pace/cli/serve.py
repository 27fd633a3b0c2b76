"""`pace serve`: one or several models over HTTP."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from pace.cli.arguments import (
    MODEL_HELP,
    add_adapter_limits,
    add_draft_arguments,
    add_loading_arguments,
    add_model_argument,
    field_explanations,
    load_arguments,
)
from pace.memory import parse_bytes
from pace.server.limits import Limits
from pace.server.models.entries import TableParser, is_named, read_entries
from pace.server.options import OF_A_MODEL, ModelEntry, ServeOptions, read_keys

if TYPE_CHECKING:
    from pace.server.network.run import Service
    from pace.server.network.security import Application

PACKAGES = ("starlette", "pydantic", "uvicorn", "httptools", "prometheus_client")
FLAG: dict[str, Any] = {"action": "store_true"}


def media_kinds(text: str) -> tuple[str, ...]:
    """Reads the value of --media."""
    return () if text == "none" else tuple(text.split(","))


def adapter(text: str) -> tuple[str, str]:
    """Reads a value of --lora."""
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH; got {text!r}")
    return name, path


OF_TEXT = ("spec_config", "max_adapters", "max_lora_rank", "media_cache_bytes", "mmproj")
"""Options for loading a model that generates text; one of vectors has no use for them."""
SERVE_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "host": ("--host", {}),
    "port": ("--port", {"type": int, "metavar": "N"}),
    "uds": ("--uds", {"metavar": "PATH"}),
    "served_model_names": ("--served-model-name", {"action": "append", "metavar": "NAME"}),
    "any_model_name": ("--any-model-name", FLAG),
    "idle_unload": ("--idle-unload", {"type": float, "metavar": "SECONDS"}),
    "tls_certificate": ("--tls-cert", {"metavar": "FILE"}),
    "tls_key": ("--tls-key", {"metavar": "FILE"}),
    "cors_origins": ("--cors-origin", {"action": "append", "metavar": "ORIGIN"}),
    "allowed_hosts": ("--allowed-host", {"action": "append", "metavar": "NAME"}),
    "media": ("--media", {"type": media_kinds, "metavar": "KINDS"}),
    "media_hosts": ("--allow-media-host", {"action": "append", "metavar": "HOST"}),
    "task": ("--task", {"metavar": "TASK"}),
    "dimensions": ("--dimensions", {"type": int, "metavar": "N"}),
    "max_image_tokens": ("--max-image-tokens", {"type": int, "metavar": "N"}),
    "prefix_dir": ("--prefix-dir", {"metavar": "DIR"}),
    "lora": ("--lora", {"action": "append", "type": adapter, "metavar": "NAME=PATH"}),
    "lora_dir": ("--lora-dir", {"metavar": "DIR"}),
    "allow_priority": ("--allow-priority", FLAG),
    "strict": ("--strict", FLAG),
    "access_log": ("--access-log", FLAG),
    "metrics_prefix": ("--metrics-prefix", {"metavar": "NAME"}),
}
"""Maps fields of ServeOptions to their options and how to read them. API keys have no option: a process list would show
them."""


def size(text: str) -> int:
    try:
        return parse_bytes(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


LIMIT_OPTIONS: dict[str, tuple[str, Any, str]] = {
    "body_bytes": ("--max-body", size, "maximum size of a request's body, such as 4MiB"),
    "media_body_bytes": ("--max-media-body", size, "maximum size of a body whose model takes images or sound"),
    "images": ("--max-images", int, "images of one request"),
    "clips": ("--max-clips", int, "clips of sound of one request"),
    "max_queue": (
        "--max-queue",
        int,
        "number of requests that may wait (default: four times those that run at once)",
    ),
    "max_wait": (
        "--max-wait",
        float,
        "maximum seconds that a request waits for its turn, or for its model to be loaded; one that would wait longer "
        "is refused with 429 or 503",
    ),
    "max_per_key": ("--max-per-key", int, "requests of one key at once (default: no limit)"),
    "connections": ("--max-connections", int, "maximum number of connections"),
    "inputs": ("--max-inputs", int, "texts of one request for vectors, scores or labels"),
    "input_tokens": ("--max-input-tokens", int, "tokens of all texts of such a request together"),
    "n": ("--max-n", int, "continuations of one prompt"),
    "prompts": ("--max-prompts", int, "prompts of one request, times its n"),
    "messages": ("--max-messages", int, "messages of one conversation"),
    "parts": ("--max-parts", int, "parts of one message"),
    "prefix_bytes": ("--max-prefix-bytes", size, "size of all kept prefixes together"),
    "adapters": ("--max-request-adapters", int, "adapters of one request"),
    "tools": ("--max-tools", int, "tools of one request, and calls in one message"),
    "top_logprobs": ("--max-logprobs", int, "alternatives with log-probabilities for each token"),
    "header_seconds": ("--header-seconds", float, "time for the headers of a request"),
    "body_seconds": ("--body-seconds", float, "time for the body of a request"),
    "write_seconds": ("--write-seconds", float, "time after which a client that reads nothing is disconnected"),
    "drain_seconds": ("--drain-seconds", float, "time for running requests when the server stops"),
}
"""Maps fields of Limits to their option, type and explanation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(parser=parser)
    group = parser.add_argument_group("model")
    add_model_argument(group, several=f"{MODEL_HELP}; NAME=MODEL names it in requests; may be given several times")
    group.add_argument(
        "--models",
        metavar="FILE",
        help="TOML file with a table for each of several models: its name, its path, and its options of this group",
    )
    _add_loading_arguments(group)
    _add_serve_arguments(parser.add_argument_group("serving"))
    _add_limit_arguments(
        parser.add_argument_group("limits", "maximum values for clients; GET /limits shows them and others")
    )


def _add_loading_arguments(group: argparse._ActionsContainer) -> None:
    add_loading_arguments(group, reads_quantization=False)
    add_draft_arguments(group)
    add_adapter_limits(group)
    group.add_argument(
        "--merge-adapter",
        dest="adapter",
        default=argparse.SUPPRESS,
        metavar="PATH",
        help="a LoRA adapter to merge into the weights of the model, also of one that makes vectors",
    )


def _table_parser() -> TableParser:
    """Returns the parser of a model's table in the file of `--models`."""
    parser = TableParser()
    _add_loading_arguments(parser)
    for name in (*OF_A_MODEL, "lora"):
        option, reader = SERVE_OPTIONS[name]
        parser.add_argument(option, dest=name, default=argparse.SUPPRESS, **reader)
    return parser


def _add_serve_arguments(group: argparse._ArgumentGroup) -> None:
    explanations = field_explanations(ServeOptions)
    defaults = {field.name: field.default for field in fields(ServeOptions)}
    for name, (option, reader) in SERVE_OPTIONS.items():
        notes = ["may be given several times"] if reader.get("action") == "append" else []
        notes += [f"default: {defaults[name]}"] if isinstance(defaults[name], (str, int)) and reader is not FLAG else []
        group.add_argument(
            option, dest=name, default=argparse.SUPPRESS, help=_help(explanations.get(name, ""), notes), **reader
        )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="file with the API keys of clients, one per line; `#` begins a comment. PACE_API_KEY may have more, "
        "separated by commas",
    )


def _add_limit_arguments(group: argparse._ArgumentGroup) -> None:
    for name, (option, kind, explanation) in LIMIT_OPTIONS.items():
        default = getattr(Limits, name)
        shown = f"{default >> 20}MiB" if kind is size else default
        notes = [] if default is None else [f"default: {shown}"]
        metavar = {size: "SIZE", int: "N", float: "SECONDS"}[kind]
        group.add_argument(
            option, dest=name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=_help(explanation, notes)
        )


def _help(explanation: str, notes: list[str]) -> str:
    return (f"{explanation} ({'; '.join(notes)})" if notes else explanation).replace("%", "%%")


def run(arguments: argparse.Namespace) -> int:
    try:
        options = serve_options(arguments)
    except (TypeError, ValueError) as error:
        arguments.parser.error(str(error))
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f'pace serve needs {name}: pip install "pace-llm[serve]"')
    from pace.server.network.run import CannotListen, WrongOptions, run

    try:
        return run(options, lambda: make_service(options, arguments))
    except (CannotListen, WrongOptions) as error:
        arguments.parser.error(str(error))


def serve_options(arguments: argparse.Namespace) -> ServeOptions:
    """Returns the server options from the command line and PACE_API_KEY. Raises TypeError or ValueError that names the
    field."""
    given = vars(arguments)
    serve = {name: given[name] for name in SERVE_OPTIONS if name in given}
    serve = {name: tuple(value) if isinstance(value, list) else value for name, value in serve.items()}
    models = _models(arguments)
    return ServeOptions(
        model=models[0].model if models else arguments.model,
        models=models,
        keys=read_keys(arguments.api_key_file),
        limits=Limits(**{name: given[name] for name in LIMIT_OPTIONS if name in given}),
        **serve,
    )


def _models(arguments: argparse.Namespace) -> tuple[ModelEntry, ...]:
    """Returns the models with names; none for a single model without one, which becomes `arguments.model`."""
    named, file = arguments.named_models, arguments.models
    if (named or file) and arguments.model is not arguments.default_model:
        option = "--model" if named else "--models"
        raise ValueError(f"the model is given twice, as {arguments.model!r} and by {option}; give it once")
    if file is None and len(named) == 1 and not is_named(named[0]):
        arguments.model = named[0]
        return ()
    return read_entries(named, file, arguments, _table_parser()) if named or file else ()


def _without_others(
    own: dict[str, Any], serve: ServeOptions, common: dict[str, Any], options: ServeOptions, makes_vectors: bool
) -> tuple[dict[str, Any], ServeOptions]:
    """Returns one of several models' options, for loading and for serving. Those that the command line has for all
    models (`common` and `options`) are left out where they are for models of the other kind."""
    if not makes_vectors:
        return own, replace(serve, dimensions=None if serve.dimensions == options.dimensions else serve.dimensions)
    own = {name: value for name, value in own.items() if name not in OF_TEXT or value != common.get(name)}
    media = None if serve.media == options.media else serve.media
    return own, replace(serve, media=media, lora_dir=None, prefix_dir=None)


def make_service(options: ServeOptions, arguments: argparse.Namespace) -> tuple[Service, Application]:
    """Returns the models and the application that `run` serves. Imports torch and Starlette. Raises WrongOptions that
    names the field."""
    from pace.llm.loading.options import LoadOptions
    from pace.server.app import make_app
    from pace.server.embeddings.service import EmbeddingService
    from pace.server.embeddings.tasks import find_task
    from pace.server.models.hosted import HostedModel
    from pace.server.models.pool import ModelPool
    from pace.server.models.shared import Shared
    from pace.server.network.run import WrongOptions
    from pace.server.service import Service

    def make_model(entry: ModelEntry, shared: Shared) -> HostedModel:
        own, serve = load_arguments(entry.arguments if options.models else arguments), options.of(entry)
        makes_vectors = find_task(serve, own) == EmbeddingService.task
        if len(options.entries) > 1:
            own.setdefault("kv_cache_bytes", f"{50 / len(options.entries):.4g}%")
            own, serve = _without_others(own, serve, load_arguments(arguments), options, makes_vectors)
        if makes_vectors:
            if wrong := next((name for name in OF_TEXT if own.get(name) is not None), None):
                what = "drafts are" if wrong == "spec_config" else f"{wrong} is"
                raise ValueError(f"{what} for models that generate text, and {entry.model} makes vectors")
            return EmbeddingService(serve, own, shared)
        return Service(serve, LoadOptions(**own, media=serve.media != ()), shared)

    try:
        pool = ModelPool.make(options, make_model)
    except (TypeError, ValueError) as error:
        raise WrongOptions(str(error)) from None
    return pool, make_app(pool)
