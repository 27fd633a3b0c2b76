"""Options that commands share: the model, and how to load it."""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import json
import os
import re
import select
import stat
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from pace.assets import TINY
from pace.llm.aliases import MODEL
from pace.llm.configs import KVCacheType
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
    "media_cache_bytes",
    "mmproj",
    "max_adapters",
    "max_lora_rank",
)
MODEL_OPTIONS += ("quantization", "backend", "revision", "cache_dir", "local_files_only", "weights", "weights_cache")
"""Arguments of LLMModel that the command line can set. The Hub's access token is not among them: HF_TOKEN sets it, so
that no process list shows it."""


TOKENIZER_HELP = "location of the tokenizer, if it is not with the model"
DTYPE_HELP = "type of float weights in memory: bfloat16 (default), float16 or float32"
MODEL_HELP = "a model: a directory, a .gguf file, or a Hub id such as org/name or org/name-GGUF:Q4_K_M"


def add_model_argument(
    group: argparse._ActionsContainer,
    default: str | None = str(TINY),
    metavar: str = "MODEL",
    help: str = MODEL_HELP,
    before: str | None = None,
    several: str | None = None,
) -> None:
    """Adds the model, as the first positional or as `-m`. `settle_model` combines the two.

    `default`: None makes the model mandatory.
    `before`: name of the positional after the model. A single positional is this one, not the model.
    `several`: the help of `-m`, if it may be given several times. `named_models` then has those with a name, or all of
    several, and the caller reads them."""
    note = " (default: the small model bundled with pace)" if default else ""
    group.add_argument("model", metavar=metavar, nargs="?", default=default, help=help + note)
    if several is None:
        group.add_argument("-m", "--model", dest="named_model", metavar=metavar, help="the model, as an option")
    else:
        group.add_argument(
            "-m",
            "--model",
            dest="named_models",
            action="append",
            default=[],
            metavar="[NAME=]MODEL",
            help=several,
        )
        group.set_defaults(named_model=None)
    group.set_defaults(default_model=default, model_before=before)


def settle_model(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Sets `model` from the positional or the option. Exits with a usage error if both are given."""
    if len(named := getattr(arguments, "named_models", [])) == 1:
        from pace.server.models.entries import is_named

        arguments.named_model = None if is_named(named[0]) else named.pop()
    word = None if arguments.model is arguments.default_model else arguments.model
    if (before := arguments.model_before) and getattr(arguments, before) is None:
        if word is not None and arguments.named_model is None and (_is_checkpoint(word) or _is_piped_model(word)):
            parser.error(
                f"{word!r} is a model, but a single argument is the {before}: write `{word} {before.upper()}`, or "
                f"`{word} -` to read the {before} from stdin; for {word!r} as the {before}, name a model with -m"
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


def _is_piped_model(word: str) -> bool:
    """True if a word looks like a model and stdin has a text, which would otherwise be ignored."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?|\S+\.gguf", word, re.IGNORECASE):
        return False
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
        return (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)) and bool(select.select([sys.stdin], [], [], 0)[0])
    except (OSError, ValueError):  # stdin is closed, or no file
        return False


def add_model_arguments(parser: argparse.ArgumentParser, before: str | None = None) -> None:
    """Adds the model (`before` as in `add_model_argument`), how to load it, and its drafter. An option that is not
    given leaves the default to LLMModel."""
    group = parser.add_argument_group("model")
    add_model_argument(group, before=before)
    add_loading_arguments(group)
    add_draft_arguments(group)


def add_media_arguments(parser: argparse.ArgumentParser, explanation: str) -> None:
    """Adds --image and --audio, lists of paths. `explanation` is that of --image."""

    def existing(path: str) -> str:
        if not os.path.isfile(path):
            raise argparse.ArgumentTypeError(f"there is no file {path}")
        return path

    reader = {"action": "append", "default": [], "metavar": "FILE", "type": existing}
    parser.add_argument("--image", help=explanation, **reader)
    parser.add_argument("--audio", help="the same with a clip of sound", **reader)


def add_adapter_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the LoRA adapters of a command that generates; `open_llm` and `load_adapters` read them."""
    group.add_argument(
        "--adapter",
        "--lora",
        dest="adapters",
        action="append",
        default=[],
        metavar="PATH",
        help="a LoRA adapter for all prompts: a directory that PEFT has saved, or a .gguf file. May be repeated: their "
        "changes add up",
    )
    group.add_argument(
        "--merge", action="store_true", help="merge the adapter into the weights, which costs no time later"
    )
    add_adapter_limits(group)


def add_adapter_limits(group: argparse._ActionsContainer) -> None:
    explanation = "maximum number of LoRA adapters that are loaded at once (default: 8)"
    group.add_argument("--max-adapters", type=count, default=argparse.SUPPRESS, metavar="N", help=explanation)
    explanation = "maximum rank of a LoRA adapter (default: 64)"
    group.add_argument("--max-lora-rank", type=count, default=argparse.SUPPRESS, metavar="N", help=explanation)


def add_draft_arguments(group: argparse._ActionsContainer) -> None:
    """Adds the options that choose a drafter; at most one may be given."""
    drafts = group.add_mutually_exclusive_group()
    drafts.add_argument(
        "--draft",
        metavar="PATH_OR_HUB_ID",
        help="speculative decoding with this smaller model of the same tokenizer, or EAGLE-3 drafter: the same text in "
        "less time",
    )
    drafts.add_argument(
        "--mtp",
        action="store_true",
        help="speculative decoding with the checkpoint's layer for multi-token prediction",
    )
    drafts.add_argument("--pard", metavar="PATH_OR_HUB_ID", help="speculative decoding with this parallel draft model")
    drafts.add_argument(
        "--prompt-lookup",
        action="store_true",
        help="speculative decoding with what followed the last tokens before: for texts that repeat their prompt",
    )


def add_loading_arguments(group: argparse._ActionsContainer, reads_quantization: bool = True) -> None:
    """Adds `MODEL_OPTIONS`, which say how to load a model. `reads_quantization` as `reads_it` in
    `add_quantization_argument`."""
    group.add_argument(
        "--tokenizer",
        dest="tokenizer_name_or_path",
        default=argparse.SUPPRESS,
        metavar="PATH_OR_HUB_ID",
        help=TOKENIZER_HELP,
    )
    add_with_aliases(group, "dtype", MODEL, default=argparse.SUPPRESS, metavar="DTYPE", help=DTYPE_HELP)
    add_quantization_argument(group, argparse.SUPPRESS, reads_quantization)
    group.add_argument(
        "--weights",
        choices=["memory", "mapped"],
        default=argparse.SUPPRESS,
        help="memory (default); mapped leaves the quantised experts of a mixture in a file, for a model larger than "
        "memory",
    )
    group.add_argument(
        "--weights-cache",
        default=argparse.SUPPRESS,
        metavar="DIR",
        help="folder of packed copies of weights, from which a model opens at once (default: $PACE_CACHE, else "
        "~/.cache/pace); with --weights mapped, folder of the experts (default: that of the model)",
    )
    group.add_argument(
        "--no-weights-cache",
        dest="weights_cache",
        action="store_const",
        const=False,
        default=argparse.SUPPRESS,
        help="do not use or write a packed copy of the weights",
    )
    add_threads_argument(group)
    group.add_argument(
        "--pin-threads",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="bind each thread to one CPU, if no other process uses these CPUs",
    )
    explanation = "maximum number of tokens of prompt and text together (default: that of the model)"
    add_with_aliases(group, "max_seq_len", MODEL, type=int, default=argparse.SUPPRESS, metavar="N", help=explanation)
    add_backend_argument(group, argparse.SUPPRESS)
    group.add_argument(
        "--kv-cache-bytes",
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="maximum memory of the key/value cache: 2GiB, or 25%% of what is left after loading (default: 50%%)",
    )
    group.add_argument(
        "--kv-cache-type",
        choices=[kind.value for kind in KVCacheType],
        default=argparse.SUPPRESS,
        help="how the key/value cache of a text grows; the results are the same (default: paged)",
    )
    group.add_argument(
        "--bmc-rows",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="with --kv-cache-type bmc: rows added at a time (default: a balance of time and memory)",
    )
    group.add_argument(
        "--prefix-cache-bytes",
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="part of the key/value cache that keeps prompts for later ones with the same beginning; 0 for none "
        "(default: a quarter)",
    )
    group.add_argument(
        "--media-cache-bytes",
        default=argparse.SUPPRESS,
        metavar="SIZE",
        help="memory for rows of encoded images and clips (default: 256MiB)",
    )
    add_mmproj_argument(group)
    add_kv_cache_dtype_argument(group, argparse.SUPPRESS)
    add_hub_arguments(group)


def add_mmproj_argument(group: argparse._ActionsContainer, default: Any = argparse.SUPPRESS) -> None:
    group.add_argument(
        "--mmproj",
        default=default,
        metavar="FILE",
        help="mmproj file with the towers of a .gguf file (default: one in its folder or repository)",
    )


def add_hub_arguments(group: argparse._ActionsContainer, default: Any = argparse.SUPPRESS) -> None:
    """Adds the options of downloads from the Hub."""
    group.add_argument(
        "--revision", default=default, metavar="NAME", help="branch, tag or commit of a model on the Hub"
    )
    group.add_argument(
        "--cache-dir", default=default, metavar="DIR", help="folder of downloads (default: the Hub's own)"
    )
    group.add_argument(
        "--local-files-only",
        action="store_true",
        default=default or False,
        help="use only files on this machine, download nothing",
    )


def add_threads_argument(group: argparse._ActionsContainer, default: Any = argparse.SUPPRESS) -> None:
    explanation = "threads that compute (default: what `pace env` shows, the physical cores)"
    add_with_aliases(group, "num_threads", MODEL, type=int, default=default, metavar="N", help=explanation)


def add_kv_cache_dtype_argument(group: argparse._ActionsContainer, default: str) -> None:
    explanation = (
        "storage of keys and values: auto (default: that of the weights), bfloat16, float16, float32, or int8, which "
        "takes about half the memory of bfloat16"
    )
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

    explanation = (
        "quantise the weights of a float checkpoint on loading: int4, int8, nf4, fp4, fp8, mxfp4, mxfp8, q2_k to q6_k, "
        """q4_0 to q8_0; or JSON with options, such as '{"format": "int4", "group": 32}'"""
    )
    group.add_argument("--quantization", type=quantization, default=default, metavar="FORMAT", help=explanation)
    add_matrix_arguments(group, argparse.SUPPRESS)
    explanation = (
        "format of the blocks of towers for images and sound: one of --quantization, or float (default: int8 if the "
        "other weights have less than 8 bits, else their format)"
    )
    group.add_argument("--towers", type=read_format, default=argparse.SUPPRESS, metavar="FORMAT", help=explanation)
    group.set_defaults(reads_quantization=reads_it)


def add_matrix_arguments(group: argparse._ActionsContainer, default: str) -> None:
    """Adds --lm-head and --embedding, the formats of these two matrices."""
    for name, what in (("--lm-head", "LM head"), ("--embedding", "embedding, which many models share with the head")):
        explanation = f"format of the {what}: one of --quantization, or float (default: by that of the other weights)"
        group.add_argument(name, type=read_format, default=default, metavar="FORMAT", help=explanation)


def read_format(text: str) -> Any:
    """A format's name, or a JSON object with its options."""
    return json.loads(text) if text.lstrip().startswith("{") else text


def settle_quantization(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Adds --lm-head, --embedding and --towers to `quantization`. Exits with a usage error for an unknown format."""
    given = {name: getattr(arguments, name) for name in ("lm_head", "embedding", "towers") if name in arguments}
    if "reads_quantization" not in arguments or not given:
        return
    try:
        asked = with_matrices(getattr(arguments, "quantization", None), **given)
        if arguments.reads_quantization:
            from pace.quant import read_quantization

            asked = read_quantization(asked)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    arguments.quantization = asked


def with_matrices(quantization: Any, **formats: Any) -> dict[str, Any]:
    """Returns a quantisation as a dict with other formats of the LM head, the embedding or the towers."""
    if quantization is None or isinstance(quantization, str):
        quantization = {"format": quantization or "float"}
    elif not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    if "load_in_4bit" in quantization or "load_in_8bit" in quantization:
        raise ValueError(
            "--lm-head, --embedding and --towers need a format of pace in --quantization, not bitsandbytes' fields"
        )
    return {**quantization, **formats}


def add_backend_argument(group: argparse._ActionsContainer, default: str) -> None:
    def backend(text: str) -> str:
        try:
            return str(read_backend(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    explanation = (
        "native (default): the C++ kernels; native-eager: the same, called one by one; torch: their specification in "
        "torch; or torch for some operators: attention=torch,mlp=torch"
    )
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


def open_llm(arguments: argparse.Namespace, is_chat: bool = False, **other: Any):
    """Loads the `LLMModel` that the options of `add_model_arguments` or `add_loading_arguments` describe. `other`
    overrides them. With `is_chat`, raises ValueError before weights are read if the model has no chat template."""
    from pace.llm import LLMModel
    from pace.llm.chat.template import ChatTemplate
    from pace.llm.loading.options import LoadOptions

    if getattr(arguments, "merge", False):
        if len(arguments.adapters) != 1:
            raise ValueError(f"--merge needs one --adapter; got {len(arguments.adapters)}")
        other |= {"adapter": arguments.adapters[0], "merge": True}
    check = ChatTemplate if is_chat else lambda tokenizer: None
    return LLMModel._open(LoadOptions(**load_arguments(arguments, **other)), check)


def load_adapters(model: Any, arguments: argparse.Namespace) -> list[tuple[str, float]] | None:
    """Loads the adapters of `--adapter` that are not merged. Returns what calls take as `adapter`."""
    if not arguments.adapters or arguments.merge:
        return None
    names = [f"{number} {os.path.basename(path)}" for number, path in enumerate(arguments.adapters, 1)]
    for path, name in zip(arguments.adapters, names):
        model.load_adapter(path, name)
    return [(name, 1.0) for name in names]


def load_arguments(arguments: argparse.Namespace, **other: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `LLMModel`, which are fields of `LoadOptions`."""
    given = {"spec_config": _spec_config(arguments), **vars(arguments), **other}
    if given.get("adapter") is not None:
        given["merge"] = True
    names = (*MODEL_OPTIONS, "spec_config", "adapter", "merge")
    return {"model_name_or_path": given["model"], **{name: given[name] for name in names if name in given}}


def _spec_config(arguments: argparse.Namespace):
    """Returns the configuration of the drafter, as `LLMModel` takes it; None without a drafter."""
    from pace.llm import DraftModelConfig, MtpConfig, PardConfig, PromptLookupConfig

    if "draft" not in arguments:
        return None
    if arguments.draft is not None:
        return DraftModelConfig(arguments.draft)
    if arguments.mtp:
        return MtpConfig()
    if arguments.pard is not None:
        return PardConfig(arguments.pard)
    return PromptLookupConfig() if arguments.prompt_lookup else None


def add_with_aliases(group: argparse._ActionsContainer, name: str, aliases: Mapping[str, str], **reader: Any) -> None:
    """Adds the option of an argument. Its names in other tools become options too, hidden from the help."""
    others = [alias for alias, meant in aliases.items() if meant == name]
    holder = group.add_mutually_exclusive_group() if others else group
    holder.add_argument(option_name(name), dest=name, **reader)
    for alias in others:
        holder.add_argument(option_name(alias), dest=name, **reader | {"help": argparse.SUPPRESS})


def option_name(name: str) -> str:
    """The option of an argument or field."""
    return "--" + name.replace("_", "-")


@functools.cache
def field_explanations(cls: type) -> dict[str, str]:
    """Maps each field of a class to the string under it, joined to one line; fields without one are left out."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
    return {
        field.target.id: " ".join(inspect.cleandoc(text.value.value).split())
        for field, text in zip(body, body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
