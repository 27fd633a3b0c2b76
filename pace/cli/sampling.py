"""Options of a generation: one for each field of SamplingConfig."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from pace.cli.arguments import add_with_aliases, field_explanations, option_name
from pace.cli.options_in_messages import rewrite
from pace.llm.configs import ALIASES, SamplingConfig


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of SamplingConfig, with its name and explanation. An option that is not given
    leaves the field unset."""
    group = parser.add_argument_group(
        "sampling", "what you do not give comes from the model's generation_config.json, else it is the default"
    )
    explanations = field_explanations(SamplingConfig) | _EXPLANATIONS
    for field in fields(SamplingConfig):
        reader = _READERS_OF.get(field.name) or _READERS.get(str(field.type))
        if reader is None or field.name in _BESIDE_OBJECTS:
            continue
        notes = ["may be given several times"] if reader.get("action") == "append" else []
        notes += [] if field.default in (None, False) else [f"default: {field.default}"]
        explanation = rewrite(explanations[field.name], _option_of_field)
        help_text = (explanation + (f" ({'; '.join(notes)})" if notes else "")).replace("%", "%%")
        add_with_aliases(group, field.name, ALIASES, default=argparse.SUPPRESS, help=help_text, **reader)


def _option_of_field(name: str, flag: bool | None) -> str | None:
    """Like `options_in_messages.option`, for fields of SamplingConfig with an underscore in their name."""
    return (
        (option_name(f"no_{name}") if flag is False else option_name(name)) if "_" in name and name in _FIELDS else None
    )


def sampling_config(arguments: argparse.Namespace) -> SamplingConfig:
    """Returns a SamplingConfig with only the given fields set. Raises ValueError or TypeError that names the field,
    also for a grammar that no model can follow. Raises ModuleNotFoundError if a grammar needs a missing package."""
    given = vars(arguments)
    config = SamplingConfig(
        **{field.name: given[field.name] for field in fields(SamplingConfig) if field.name in given}
    )
    if grammar := config.make_grammar():
        grammar.check()
    return config


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
            f"{text!r} must be a JSON object of token ids and numbers, such as '{{\"42\": 1.5}}'"
        ) from None


def _early_stopping(text: str) -> bool | str:
    words = {"true": True, "false": False, "never": "never"}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r} must be true, false or never")
    return words[text.lower()]


def _file_of(what: str, inline: str | None = None) -> Callable[[str], str]:
    """Returns a function that reads a file. Text that begins with `inline` is taken as the contents."""

    def read(path: str) -> str:
        if inline and path.lstrip().startswith(inline):
            return path
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{path!r} cannot be read ({error}); give a file with {what}") from None

    return read


_READERS_OF: dict[str, dict[str, Any]] = {
    "json_schema": {"type": _file_of("a JSON schema", inline="{"), "metavar": "FILE_OR_JSON"},
    "grammar": {"type": _file_of("a grammar in Lark or GBNF"), "metavar": "FILE"},
    "regex": {"metavar": "REGEX"},
    "json_whitespace": {"metavar": "flexible|compact|spaced|REGEX"},
    "choices": {"nargs": "+", "metavar": "TEXT"},
}
"""Field -> arguments of `add_argument`, for fields that need more than their type."""
_READERS: dict[str, dict[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": int, "metavar": "N"},
    "int | bool | None": {"type": int, "metavar": "N"},
    "int | list[int] | None": {"type": int, "action": "append", "metavar": "ID"},
    "list[int] | None": {"type": int, "action": "append", "metavar": "ID"},
    "float": {"type": float, "metavar": "X"},
    "bool": {"action": argparse.BooleanOptionalAction},
    "bool | str": {"type": _early_stopping, "metavar": "true|false|never"},
    "str | list[str] | None": {"action": "append", "metavar": "TEXT"},
    "list[list[int]] | None": {"type": _json_of("runs of token ids", "'[[5, 6], [7]]'"), "metavar": "JSON"},
    "dict[int, float] | None": {"type": _logit_bias, "metavar": "JSON"},
}
"""Type of a field -> arguments of `add_argument`. Objects (logits_processors, token_mask) have no option."""
_FIELDS = {field.name for field in fields(SamplingConfig)}
_EXPLANATIONS = {
    "max_new_tokens": "Maximum number of tokens to generate. By default, a text goes on until the model ends it or the "
    "context is full.",
    "max_length": "Maximum number of tokens of prompt and text together. --max-new-tokens overrides it.",
    "do_sample": "Draw each token at random, or always take the most likely one. By default, a temperature above 0 or "
    "a filter such as --top-p turns sampling on. Without any, a chat is sampled with temperature 0.7 and top-p "
    "0.9, and "
    "plain text is greedy.",
    "temperature": "Below 1, likely tokens become likelier; 0 always takes the most likely one. In a chat, 0.7 if "
    "nothing is set.",
    "top_p": "Keeps the most likely tokens whose probabilities sum to X. In a chat, 0.9 if nothing is set.",
    "early_stopping": "In beam search, true ends it with --num-beams finished texts, false when a better one is "
    "unlikely, never when none is possible.",
    "eos_token_id": "Id of a token that ends the text, instead of those of the model.",
    "pad_token_id": "Id of the token that pads tensors in Python. It does not change printed texts.",
    "suppress_tokens": "Id of a token that is not generated, instead of those of the model.",
    "bad_words_ids": "Lists of token ids that must not follow each other, such as [[5, 6], [7]].",
    "logit_bias": """Numbers added to the logits of tokens, by id, such as '{"42": 1.5, "7": "-inf"}'; -inf bans.""",
    "seed": "With the same seed, sampling gives the same text. Without one, each run gives another.",
    "logprobs": "With --json: the log-probability of each token, and of the N most likely ones in its place; 0 for "
    "none of these. They are the model's own, before temperature, penalties and filters.",
    "prompt_logprobs": "The same for each token of the prompt except the first.",
    "unmasked_logprobs": "Log-probabilities over all tokens, not only those that a grammar allows.",
    "json_schema": "The text is JSON of this schema: a file, or the schema itself. Needs pace-llm[grammar], as the "
    "next options do; give only one of them.",
    "grammar": "The text follows the grammar in this file, in Lark or GBNF (docs/structured.md).",
    "json_whitespace": "Whitespace within JSON: flexible; compact: none; spaced: one blank after each colon and "
    "comma; or a regular expression of blanks.",
}
"""Explanations of options for fields whose own explanations are about Python."""
_BESIDE_OBJECTS = {"step_every", "step_strings"}
"""Fields that only apply together with an object, such as a step callback."""
