"""Converts sampling fields of clients to a `SamplingConfig`."""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel

from pace.llm.configs import SamplingConfig
from pace.llm.constraints.masks import AllowedTokens
from pace.llm.defaults import DRAWS, with_defaults
from pace.server.errors import ApiError
from pace.server.limits import Limits

BAN = -100.0
"""The `logit_bias` at which OpenAI bans a token."""

PENALTIES = ("repetition_penalty", "no_repeat_ngram_size")
"""Further defaults from a checkpoint's generation_config.json."""
GREEDY_BELOW = 1e-6
"""Temperatures below this mean greedy."""


class Settings:
    """Builds the config of one request. Errors name the client's field."""

    def __init__(self, limits: Limits, defaults: SamplingConfig, is_chat: bool = True) -> None:
        """`defaults` are the checkpoint's; `is_chat` as in `with_defaults`."""
        self.limits = limits
        self.config = SamplingConfig()
        self.tokens_named: dict[str, list[int]] = {}
        """Token ids given by the client, by field."""
        self._defaults = defaults
        self._is_chat = is_chat

    def set(self, name: str, value: Any, param: str | None = None) -> None:
        """Sets a field of the config; None leaves it unchanged. `param` is the client's name for it."""
        if value is None:
            return
        try:
            self.config.set_field(name, value, param or name)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param=param or name) from None

    def draws(self, request: BaseModel) -> None:
        """Sets the rules of the draw: the request's fields of these names, else pace's defaults (`with_defaults`).
        Only `top_k` is off by default over HTTP. A temperature of 0 means greedy. A `top_k` of -1 means off, as in
        vLLM."""
        known = type(request).model_fields  # other fields of the body are attributes, too
        rules = {name: getattr(request, name) if name in known else None for name in DRAWS}
        if rules["temperature"] is not None and 0 <= rules["temperature"] < GREEDY_BELOW:
            rules["temperature"], self.config.do_sample = None, False
        if rules["top_k"] == -1:
            rules["top_k"] = 0
        for name, value in rules.items():
            self.set(name, value)
        settled = with_defaults(self.config, self._defaults, self._is_chat)
        for name in {"do_sample", *DRAWS, *PENALTIES} & settled.explicit_fields:
            setattr(self.config, name, getattr(settled, name))
        if "top_k" not in settled.explicit_fields:
            self.config.top_k = 0

    def seed(self, value: int | None) -> None:
        """Accepts any signed or unsigned 64-bit number."""
        if value is not None and not -(2**63) <= value < 2**64:
            raise ApiError(400, f"seed must be a 64-bit integer, got {value}", param="seed")
        self.set("seed", None if value is None else value % 2**64)

    def num_choices(self, value: int, param: str = "n") -> None:
        """Sets the number of continuations. With greedy decoding only one is computed, and returned `value` times."""
        if not 1 <= value <= self.limits.n:
            raise ApiError(400, f"{param} must be from 1 to {self.limits.n}, got {value}", param=param)
        self.config.num_return_sequences = value if self.config.do_sample else 1

    def stop(self, value: str | list[str] | None, param: str = "stop") -> None:
        strings = [value] if isinstance(value, str) else list(value or ())
        most, longest = self.limits.stop_strings, self.limits.stop_characters
        if len(strings) > most or any(len(string) > longest for string in strings):
            raise ApiError(
                400, f"{param} may have {most} strings of {longest} characters, got {len(strings)}", param=param
            )
        self.set("stop_strings", list(dict.fromkeys(strings)) or None, param)

    def end_tokens(self, stop_token_ids: list[int] | None, ignore_eos: bool) -> None:
        """Adds `stop_token_ids` to the end tokens; with `ignore_eos` they are the only ones."""
        own = [] if ignore_eos else list(self._defaults.eos_token_id or ())
        self._check_count("stop_token_ids", stop_token_ids)
        if stop_token_ids:
            self.tokens_named["stop_token_ids"] = stop_token_ids
            self.set("eos_token_id", [*own, *stop_token_ids], "stop_token_ids")
        elif ignore_eos:
            self.config.ignore_eos = True

    def logit_bias(self, value: dict[str, float] | None) -> None:
        """Accepts token ids as strings for keys. Values up to BAN ban the token."""
        self._check_count("logit_bias", value)
        biases: dict[int, float] = {}
        for key, bias in (value or {}).items():
            if not (key.isascii() and key.isdigit()) or len(key) > 10:
                raise ApiError(
                    400, f'logit_bias: keys are token ids, such as "123"; got {key[:40]!r}', param="logit_bias"
                )
            if not -100 <= bias <= 100:
                raise ApiError(400, f"logit_bias: biases are from -100 to 100; got {bias:g}", param="logit_bias")
            if int(key) in biases:
                raise ApiError(400, f"logit_bias names the token {int(key)} twice", param="logit_bias")
            self.tokens_named.setdefault("logit_bias", []).append(int(key))
            biases[int(key)] = -math.inf if bias <= BAN else float(bias)
        self.set("logit_bias", biases or None)

    def allowed_tokens(self, value: list[int] | None) -> None:
        self._check_count("allowed_token_ids", value)
        if value is not None:
            if not value or min(value) < 0:
                raise ApiError(
                    400, "allowed_token_ids must name at least one token id, none below 0", param="allowed_token_ids"
                )
            self.tokens_named["allowed_token_ids"] = value
            self.config.token_mask = AllowedTokens(value)

    def logprobs(self, value: int | None, param: str, name: str = "logprobs") -> None:
        """Sets the number of likeliest tokens to record in addition to the chosen one; None for no record."""
        most = self.limits.top_logprobs
        if value is not None and not 0 <= value <= most:
            raise ApiError(400, f"{param} must be from 0 to {most}, got {value}", param=param)
        self.set(name, value, param)

    def _check_count(self, param: str, value: Any) -> None:
        if value is not None and len(value) > self.limits.token_lists:
            raise ApiError(400, f"{param} may have {self.limits.token_lists} entries, got {len(value)}", param=param)
