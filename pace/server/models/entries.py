"""Reads the models of a server: `--model NAME=MODEL`, and the tables of a `--models` file."""

from __future__ import annotations

import argparse
import copy
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from pace.naming import meant, shown
from pace.server.options import ModelEntry, name_of

OWN_KEYS = ("model", "aliases", "idle_unload", "load_on_startup")
"""Keys of a table that are no options of the command line."""
OF_THE_PROCESS = ("num_threads", "pin_threads")
"""Options that all models share."""
DRAFTS: dict[str, Any] = {"draft": None, "mtp": False, "pard": None, "prompt_lookup": False}
"""Options that choose a drafter, with their defaults. A table that has one replaces the command line's."""


class TableParser(argparse.ArgumentParser):
    """Parses the options of one table. Raises ValueError for what is wrong in them."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.replace("argument --", ""))


def read_entries(
    named: Sequence[str], file: str | Path | None, arguments: argparse.Namespace, parser: TableParser
) -> tuple[ModelEntry, ...]:
    """Returns the models of a file, then those of `--model`, each a [NAME=]MODEL.

    `arguments` has the options of the command line, which hold for all models without a value of their own. `parser`
    has the options that a table may have. Raises TypeError or ValueError that names the file and the table."""
    entries = [] if file is None else _read_file(Path(file), arguments, parser)
    return (*entries, *(_named(text, arguments) for text in named))


def is_named(text: str) -> bool:
    """True for NAME=MODEL; false for a model, also if its path has a "="."""
    return "=" in text and not Path(text).exists()


def _named(text: str, arguments: argparse.Namespace) -> ModelEntry:
    name, _, model = text.partition("=") if is_named(text) else (name_of(text), "", text)
    if not name or not model:
        raise ValueError(f"model must be a model or NAME=MODEL; got {shown(text)}")
    return ModelEntry((name,), model, _with(arguments, model), getattr(arguments, "idle_unload", None))


def _read_file(path: Path, arguments: argparse.Namespace, parser: TableParser) -> list[ModelEntry]:
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"models: cannot read {path} ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"models: {path} is not TOML: {error}") from None
    if not tables:
        raise ValueError(f'models: {path} has no models; a table names one, as in [chat] and model = "org/name"')
    entries = []
    for name, table in tables.items():
        try:
            entries.append(_read_table(name, table, arguments, parser))
        except (TypeError, ValueError) as error:
            raise type(error)(f"models: {path}: [{name}]: {error}") from None
    return entries


def _read_table(name: str, table: Any, arguments: argparse.Namespace, parser: TableParser) -> ModelEntry:
    if not isinstance(table, dict):
        raise ValueError("must be a table; give options of all models on the command line")
    given, table = table, {key.replace("-", "_"): value for key, value in table.items()}
    if len(table) < len(given):
        raise ValueError(f"has a key twice, with - and with _: {', '.join(given)}; give each once")
    if nested := [key for key, value in table.items() if isinstance(value, dict) and "model" in value]:
        raise ValueError(f'is a table of tables; write ["{name}.{nested[0]}"] for a name with a dot')
    own = {key: table.pop(key) for key in OWN_KEYS if key in table}
    own = {"aliases": [], "idle_unload": getattr(arguments, "idle_unload", None), "load_on_startup": True} | own
    if not isinstance(own.get("model"), str):
        raise ValueError('needs model = "...", a directory, a .gguf file, or a Hub id')
    if not isinstance(own["aliases"], list) or not all(isinstance(alias, str) for alias in own["aliases"]):
        raise TypeError(f"aliases must be a list of names; got {shown(own['aliases'])}")
    if not isinstance(own["load_on_startup"], bool):
        raise TypeError(f"load-on-startup must be true or false; got {shown(own['load_on_startup'])}")
    seconds = own["idle_unload"] or None  # 0 keeps the model loaded
    loading = _parsed(table, _with(arguments, own["model"]), parser)
    return ModelEntry((name, *own["aliases"]), own["model"], loading, seconds, own["load_on_startup"])


def _with(arguments: argparse.Namespace, model: str) -> argparse.Namespace:
    loading = copy.copy(arguments)
    loading.model = model
    return loading


def _parsed(table: dict[str, Any], arguments: argparse.Namespace, parser: TableParser) -> argparse.Namespace:
    """Returns `arguments` with the options of a table."""
    known = [option.removeprefix("--") for option in parser._option_string_actions if not option.startswith("--no-")]
    words: list[str] = []
    if any(key in DRAFTS for key in table):
        vars(arguments).update(DRAFTS)
    for key, value in table.items():
        name = key.replace("_", "-")
        if key in OF_THE_PROCESS:
            raise ValueError(f"{name} is for all models; give it on the command line")
        if name not in known:
            raise ValueError(f"unknown key {name}{meant(name, [*known, *map(_dashed, OWN_KEYS)])}")
        if value is False and key not in NEGATED and parser._option_string_actions[f"--{name}"].nargs != 0:
            raise ValueError(f"{name} = false: it takes a value; leave it out for its default")
        words += words_of(name, value)
    parser.parse_args(words, arguments)
    vars(arguments).update({key: False for key, value in table.items() if value is False and key not in NEGATED})
    return arguments


def words_of(name: str, value: Any) -> list[str]:
    """Returns the words of a command line for an option and its value in a file."""
    option = f"--{_dashed(name)}"
    match value:
        case list() | tuple():
            return [f"{option}={one}" for one in value]
        case dict():
            return [f"{option}={json.dumps(value)}"]
        case True | "true" | "True":
            return [option]
        case False | "false" | "False":
            return [f"--no-{_dashed(name)}"] if name.replace("-", "_") in NEGATED else []
    return [f"{option}={value}"]


NEGATED = ("pin_threads", "weights_cache")
"""Options whose `false` has an option of its own."""


def _dashed(name: str) -> str:
    return name.replace("_", "-")
