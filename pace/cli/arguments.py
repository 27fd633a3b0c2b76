"""Options that commands share: the model, how to load it, and one option for each field of SamplingConfig."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pace.assets import TINY
from pace.llm.aliases import MODEL
from pace.llm.configs import ALIASES, KVCacheType, SamplingConfig
from pace.llm.operators import read_backend

MODEL_OPTIONS = (
    "tokenizer_name_or_path",
    "dtype",
    "num_threads",
    "pin_threads",
    "max_seq_len",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "kv_cache_type",
    "bmc_rows",
    "prefix_cache_bytes",
)
MODEL_OPTIONS += ("quantization", "backend", "revision", "cache_dir", "local_files_only", "weights", "weights_cache")
"""Arguments of LLMModel that the command line can set. The token is missing: set HF_TOKEN, which no process list
shows."""


MODEL_HELP = "a checkpoint (path or Hub id), or a .gguf file"


def add_model_argument(
    group: argparse._ActionsContainer,
    default: str | None = str(TINY),
    metavar: str = "MODEL",
    help: str = MODEL_HELP,
    before: str | None = None,
) -> None:
    """Adds the model, as the first positional or as `-m`. `settle_model` combines the two.

    `default`: None makes the model mandatory.
    `before`: name of the positional after the model. A single positional is this one, not the model."""
    note = " (default: the small model that comes with pace)" if default else ""
    group.add_argument("model", metavar=metavar, nargs="?", default=default, help=help + note)
    group.add_argument("-m", "--model", dest="named_model", metavar=metavar, help="the same, as an option")
    group.set_defaults(default_model=default, model_before=before)


def settle_model(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sets `model` from the positional or the option. Exits with a usage error if both are given."""
    word = None if arguments.model is arguments.default_model else arguments.model
    if (before := arguments.model_before) and getattr(arguments, before) is None:
        if word is not None and arguments.named_model is None and _is_checkpoint(word):
            parser.error(
                f"{word!r} is a checkpoint, and one word is the {before}: give both, or `-` to read it from stdin"
            )
        setattr(arguments, before, word)
        word = None
    if word is not None and arguments.named_model is not None:
        parser.error(f"the model is given twice, as {word!r} and by --model; give it once")
    given = arguments.named_model if word is None else word
    arguments.model = arguments.default_model if given is None else given


def _is_checkpoint(word: str) -> bool:
    """True if a word names a checkpoint on this machine."""
    return word.lower().endswith(".gguf") and os.path.isfile(word) or os.path.isfile(os.path.join(word, "config.json"))


def add_model_arguments(parser: argparse.ArgumentParser, before: str | None = None) -> None:
    """Adds the model (`before` as in `add_model_argument`), how to load it, and its drafter. An option that is not
    given leaves the default to LLMModel."""
    group = parser.add_argument_group("model")
    add_model_argument(group, before=before)
    add_loading_arguments(group)
    add_draft_arguments(group)


def add_draft_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the options that choose a drafter; at most one may be given."""
    drafts = group.add_mutually_exclusive_group()
    drafts.add_argument(
        "--draft",
        metavar="PATH_OR_HUB_ID",
        help="a smaller model of the same tokenizer that drafts, for the same text in less time",
    )
    drafts.add_argument("--pard", metavar="PATH_OR_HUB_ID", help="a parallel draft model (PARD) that drafts")
    drafts.add_argument(
        "--prompt-lookup", action="store_true", help="draft what followed the last tokens before: for outputs that copy"
    )


def add_loading_arguments(group: argparse._ActionsContainer, reads_quantization: bool = True) -> None:
    """Adds `MODEL_OPTIONS`, which say how to load a model. `reads_quantization` as `reads_it` in
    `add_quantization_argument`."""
    group.add_argument(
        "--tokenizer",
        dest="tokenizer_name_or_path",
        default=argparse.SUPPRESS,
        metavar="PATH_OR_HUB_ID",
        help="where it is not with the model",
    )
    add_with_aliases(
        group, "dtype", MODEL, default=argparse.SUPPRESS, metavar="DTYPE", help="bfloat16 (default), float16 or float32"
    )
    add_quantization_argument(group, argparse.SUPPRESS, reads_quantization)
    group.add_argument(
        "--weights",
        choices=["memory", "mapped"],
        default=argparse.SUPPRESS,
        help="mapped: quantised experts of a mixture stay in a file, for a model larger than memory",
    )
    group.add_argument(
        "--weights-cache",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="the folder of packed copies of weights, which open at once (default: PACE_CACHE); with mapped, of the experts' file",
    )
    group.add_argument(
        "--no-weights-cache",
        dest="weights_cache",
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        help="neither use nor write a packed copy",
    )
    add_threads_argument(group)
    group.add_argument(
        "--pin-threads",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="each thread on a CPU of its own, for a process that has its CPUs to itself",
    )
    explanation = "default: what the model was made for"
    add_with_aliases(group, "max_seq_len", MODEL, type=int, default=argparse.SUPPRESS, metavar="N", help=explanation)
    add_backend_argument(group, argparse.SUPPRESS)
    group.add_argument(
        "--kv-cache-bytes",
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="what keys and values may take, such as 2GiB (default: half of the memory that is left)",
    )
    group.add_argument(
        "--kv-cache-type",
        choices=[kind.value for kind in KVCacheType],
        default=argparse.SUPPRESS,
        help="how their room grows (default: paged)",
    )
    group.add_argument(
        "--bmc-rows",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="with bmc: new rows at a time (default: what balances time and memory)",
    )
    group.add_argument(
        "--prefix-cache-bytes",
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="what the beginnings of earlier sequences may take; 0 for none (default: a quarter)",
    )
    add_kv_cache_dtype_argument(group, argparse.SUPPRESS)
    group.add_argument("--revision", default=argparse.SUPPRESS, help="branch, tag or commit on the Hub")
    group.add_argument("--cache-dir", default=argparse.SUPPRESS, metavar="DIR", help="where downloads are kept")
    group.add_argument("--local-files-only", action="store_true", default=argparse.SUPPRESS, help="download nothing")


def add_threads_argument(group: argparse._ActionsContainer, default: Any = argparse.SUPPRESS) -> None:
    explanation = "default: what `pace env` says"
    add_with_aliases(group, "num_threads", MODEL, type=int, default=default, metavar="N", help=explanation)


def add_kv_cache_dtype_argument(group: argparse._ActionsContainer, default: str) -> None:
    explanation = "of keys and values: auto (default: that of the weights), bfloat16, float16, float32, or int8, which takes about half of bfloat16's memory"
    group.add_argument("--kv-cache-dtype", default=default, metavar="NAME", help=explanation)


def add_quantization_argument(group: argparse._ActionsContainer, default: str | None, reads_it: bool = True) -> None:
    """`reads_it`: parse the value into a QuantizationConfig here, which imports torch; otherwise `LoadOptions` parses
    it."""

    def quantization(text: str) -> Any:
        try:
            asked = json.loads(text) if text.lstrip().startswith("{") else text
            if not reads_it:
                return asked
            from pace.quant import read_quantization

            return read_quantization(asked)
        except (TypeError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    explanation = 'hold the weights as int8, int4, q2_k to q6_k, q4_0 to q8_0, nf4, fp4, mxfp4, mxfp8 or fp8; or, as JSON, arguments of QuantizationConfig: \'{"format": "int4", "group": 32}\''
    group.add_argument("--quantization", type=quantization, default=default, metavar="FORMAT", help=explanation)


def add_backend_argument(group: argparse._ActionsContainer, default: str) -> None:
    def backend(text: str) -> str:
        try:
            return str(read_backend(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    explanation = "native kernels (default), native-eager for the same op by op, torch to check them, or some operators on torch: attention=torch,mlp=torch"
    group.add_argument("--backend", type=backend, default=default, metavar="NAME", help=explanation)


def count(text: str) -> int:
    """Converts the text of an option to an integer of at least 1, for use as `type=`."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1; got {text!r}")
    return number


def load_model(arguments: argparse.Namespace, **other: Any):
    """Loads the `LLMModel` that the options of `add_model_arguments` or `add_loading_arguments` describe. `other`
    overrides them."""
    from pace.llm import LLMModel

    return LLMModel(**load_arguments(arguments, **other))


def load_arguments(arguments: argparse.Namespace, **other: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `LLMModel`, which are fields of `LoadOptions`."""
    given = {"spec_config": _spec_config(arguments), **vars(arguments), **other}
    names = (*MODEL_OPTIONS, "spec_config")
    return {"model_name_or_path": given["model"], **{name: given[name] for name in names if name in given}}


def _spec_config(arguments: argparse.Namespace):
    """Returns the configuration of the drafter, as `LLMModel` takes it; None without a drafter."""
    from pace.llm import DraftModelConfig, PardConfig, PromptLookupConfig

    if "draft" not in arguments:
        return None
    if arguments.draft is not None:
        return DraftModelConfig(arguments.draft)
    if arguments.pard is not None:
        return PardConfig(arguments.pard)
    return PromptLookupConfig() if arguments.prompt_lookup else None


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of SamplingConfig, with its name and explanation. An option that is not given
    leaves the field unset."""
    group = parser.add_argument_group(
        "sampling", "what is not given is the checkpoint's generation_config.json, else the default"
    )
    explanations = field_explanations(SamplingConfig)
    for field in fields(SamplingConfig):
        reader = _READERS_OF.get(field.name) or _READERS.get(str(field.type))
        if reader is None or field.name in _BESIDE_OBJECTS:
            continue
        notes = ["may be given several times"] if reader.get("action") == "append" else []
        notes += [] if field.default is None else [f"default: {field.default}"]
        help_text = (
            f"{explanations.get(field.name, '')}{' (' + '; '.join(notes) + ')' if notes else ''}".strip().replace(
                "%", "%%"
            )
        )
        add_with_aliases(group, field.name, ALIASES, default=argparse.SUPPRESS, help=help_text, **reader)


def add_with_aliases(group: argparse._ActionsContainer, name: str, aliases: Mapping[str, str], **reader: Any) -> None:
    """Adds the option of an argument. Its names in other tools become options too, hidden from the help."""
    others = [alias for alias, meant in aliases.items() if meant == name]
    holder = group.add_mutually_exclusive_group() if others else group
    holder.add_argument(_option(name), dest=name, **reader)
    for alias in others:
        holder.add_argument(_option(alias), dest=name, **reader | {"help": argparse.SUPPRESS})


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def sampling_config(arguments: argparse.Namespace) -> SamplingConfig:
    """Returns a SamplingConfig with only the given fields set. Raises ValueError or TypeError that names the field."""
    given = vars(arguments)
    return SamplingConfig(**{field.name: given[field.name] for field in fields(SamplingConfig) if field.name in given})


@functools.cache
def field_explanations(cls: type) -> dict[str, str]:
    """Maps each field of a class to the string under it, joined to one line; fields without one are left out."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _json_of(what: str, shape: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error}); give {what} as {shape}") from None

    return read


def _logit_bias(text: str) -> dict[int, float]:
    """Reads a JSON object: its string keys become token ids, and the value "-inf" bans a token."""
    pairs = _json_of("token ids and biases", '\'{"42": 1.5, "7": "-inf"}\'')(text)
    try:
        return {int(token): float(bias) for token, bias in pairs.items()}
    except (AttributeError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a JSON object of token id to number, as '{{\"42\": 1.5}}'"
        ) from None


def _early_stopping(text: str) -> bool | str:
    words = {"true": True, "false": False, "never": "never"}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} must be true, false or never")
    return words[text.lower()]


def _file_of(what: str) -> Callable[[str], str]:
    def read(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{path!r} cannot be read ({error}); give a file with {what}") from None

    return read


_READERS_OF: dict[str, dict[str, Any]] = {
    "json_schema": {"type": _file_of("a JSON schema"), "metavar": "FILE"},
    "grammar": {"type": _file_of("a grammar in Lark or GBNF"), "metavar": "FILE"},
    "regex": {"metavar": "REGEX"},
    "json_whitespace": {"metavar": "flexible|compact|spaced|REGEX"},
    "choices": {"nargs": "+", "metavar": "TEXT"},
}
"""How to read fields whose type is not enough to parse them."""
_READERS: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": int, "metavar": "N"},
    "int | bool | None": {"type": int, "metavar": "N"},
    "int | list[int] | None": {"type": int, "action": "append", "metavar": "ID"},
    "float": {"type": float, "metavar": "X"},
    "bool": {"action": argparse.BooleanOptionalAction},
    "bool | str": {"type": _early_stopping, "metavar": "true|false|never"},
    "str | list[str] | None": {"action": "append", "metavar": "TEXT"},
    "list[list[int]] | None": {"type": _json_of("runs of token ids", "'[[5, 6], [7]]'"), "metavar": "JSON"},
    "dict[int, float] | None": {"type": _logit_bias, "metavar": "JSON"},
}
"""How to read a field of each type. Objects (logits_processors, token_mask) have no option."""
_BESIDE_OBJECTS = {"step_every", "step_strings"}
"""Fields that only apply to such an object."""
