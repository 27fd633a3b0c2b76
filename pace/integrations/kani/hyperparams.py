"""Converts decoding hyperparameters, named as in transformers, OpenAI's API or llama.cpp, to a SamplingConfig."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from pace.llm import SamplingConfig, configs
from pace.llm.configs import WITHOUT_EFFECT
from pace.naming import meant

ALIASES = {**configs.ALIASES, "repeat_penalty": "repetition_penalty"}
"""Alternative names of fields, including llama.cpp's."""
REFUSED = {
    "num_return_sequences": "an engine of kani returns one message",
    "prompt_logprobs": "a completion of kani has no field for them",
    "step_callback": "calls and reasoning are parsed from the text, which it may change",
    "step_every": "it belongs to step_callback",
    "step_strings": "it belongs to step_callback",
    "token_healing": "the chat template determines where the prompt ends",
}
FIELDS = {field.name for field in fields(SamplingConfig)}
KNOWN = FIELDS | {"tool_choice", "parallel_tool_calls", "stop_token_ids", "top_logprobs"}
"""Fields of SamplingConfig, and options named as in OpenAI's API."""
_EXCLUSIVE = (
    {"max_new_tokens", "max_length"},
    {"json_schema", "regex", "grammar", "choices", "response_format", "token_mask"},
    {"logprobs", "top_logprobs"},
)
"""Groups of options: a call that sets one discards the engine's defaults for its group."""


def read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in `given`, named as in `KNOWN`. Without `do_sample`, temperature 0 means greedy, and any
    other sampling field turns sampling on.

    Logs a warning for unknown names. Raises TypeError and ValueError for invalid values, for two names of one field,
    and for options that an engine of kani cannot support.
    """
    wanted: dict[str, Any] = {}
    checked = SamplingConfig()
    for name, value in given.items():
        field = ALIASES.get(name, name)
        if value is None or (field in REFUSED and value is False) or (field, value) == ("num_return_sequences", 1):
            continue
        if field in REFUSED:
            raise ValueError(f"{name}={value!r:.60} is not supported: {REFUSED[field]}")
        if field not in KNOWN:
            hint = meant(name, sorted({*KNOWN, *ALIASES}))
            warnings.warn(f"pace has no hyperparameter {name}, and ignores it{hint}", stacklevel=3)
            continue
        if field in wanted:
            raise TypeError(f"{name} and {field} mean the same; give one of them")
        if field == "top_k" and value == -1:
            value = 0
        elif field == "logit_bias" and isinstance(value, Mapping):
            value = {int(token): bias for token, bias in value.items()}
        elif field == "parallel_tool_calls" and not isinstance(value, bool):
            raise TypeError(f"parallel_tool_calls must be True or False; got {value!r}")
        if field in FIELDS:
            checked.set_field(field, value, name)
        wanted[field] = value
    if "do_sample" not in wanted and any(name in wanted for name in WITHOUT_EFFECT):
        wanted["do_sample"] = wanted.get("temperature") != 0
    return wanted


def merged(defaults: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two results of `read`; `wanted` overrides `defaults`."""
    replaced = {name for group in _EXCLUSIVE if group & wanted.keys() for name in group}
    return {name: value for name, value in defaults.items() if name not in replaced} | dict(wanted)


def sampling_config(wanted: Mapping[str, Any], end_tokens: Iterable[int], max_length: int) -> SamplingConfig:
    """Returns the config for the wanted options. It adds `end_tokens`, and without a given length limits prompt and
    answer to `max_length` tokens."""
    config = SamplingConfig(**{name: value for name, value in wanted.items() if name in FIELDS})
    ends = [*end_tokens, *(config.eos_token_id or ()), *wanted.get("stop_token_ids", ())]
    config.eos_token_id = list(dict.fromkeys(ends)) or None
    if "top_logprobs" in wanted:
        config.logprobs = wanted["top_logprobs"]
    if not config.has_length:
        config.max_length = max_length
    return config
