"""Converts sampling fields of clients to a `SamplingConfig`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pace.llm.configs import WITHOUT_EFFECT, SamplingConfig
from pace.llm.constraints.masks import AllowedTokens
from pace.llm.defaults import with_defaults
from pace.server.errors import ApiError, invalid
from pace.server.limits import Limits
from pace.server.schemas.fields import check_range

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
        self.budget_param = "thinking_budget"
        """The client's name for the thinking budget."""
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
        rules = {name: getattr(request, name) if name in known else None for name in WITHOUT_EFFECT}
        if rules["temperature"] is not None and 0 <= rules["temperature"] < GREEDY_BELOW:
            rules["temperature"], self.config.do_sample = None, False
        if rules["top_k"] == -1:
            rules["top_k"] = 0
        for name, value in rules.items():
            self.set(name, value)
        settled = with_defaults(self.config, self._defaults, self._is_chat)
        for name in {"do_sample", *WITHOUT_EFFECT, *PENALTIES} & settled.explicit_fields:
            setattr(self.config, name, getattr(settled, name))
        if "top_k" not in settled.explicit_fields:
            self.config.top_k = 0
        if not settled.do_sample:  # many clients send filters with temperature 0: no warning for them
            for name in WITHOUT_EFFECT:
                setattr(self.config, name, None)

    def seed(self, value: int | None) -> None:
        """Accepts any signed or unsigned 64-bit number. Greedy decoding needs none."""
        check_range("seed", value, -(2**63), 2**64 - 1)
        self.set("seed", value % 2**64 if value is not None and self.config.do_sample else None)

    def num_choices(self, value: int, param: str = "n") -> None:
        """Sets the number of continuations. With greedy decoding only one is computed, and returned `value` times."""
        check_range(param, value, 1, self.limits.n)
        self.config.num_return_sequences = value if self.config.do_sample else 1

    def stop(self, value: str | list[str] | None, param: str = "stop") -> None:
        strings = [value] if isinstance(value, str) else list(value or ())
        max_strings, max_characters = self.limits.stop_strings, self.limits.stop_characters
        if len(strings) > max_strings or any(len(string) > max_characters for string in strings):
            raise invalid(
                param,
                f"may have at most {max_strings} strings of at most {max_characters} characters, got {len(strings)}",
            )
        self.set("stop_strings", list(dict.fromkeys(strings)) or None, param)

    def thinking_budget(self, given: Mapping[str, int | None]) -> None:
        """Sets the thinking budget from the names that clients have for it; -1 means none, as in llama.cpp."""
        names = [name for name, value in given.items() if value not in (None, -1)]
        if len(names) > 1:
            raise invalid(names[1], f"means the same as {names[0]}; send one of them")
        for name in names:
            self.budget_param = name
            self.set("thinking_budget", given[name], name)

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
                raise invalid("logit_bias", f'keys must be token ids, such as "123"; got {key[:40]!r}')
            if not -100 <= bias <= 100:
                raise invalid("logit_bias", f"values must be from -100 to 100, got {bias:g}")
            if int(key) in biases:
                raise invalid("logit_bias", f"names the token {int(key)} twice")
            self.tokens_named.setdefault("logit_bias", []).append(int(key))
            biases[int(key)] = -math.inf if bias <= BAN else float(bias)
        self.set("logit_bias", biases or None)

    def allowed_tokens(self, value: list[int] | None) -> None:
        self._check_count("allowed_token_ids", value)
        if value is not None:
            if not value or min(value) < 0:
                raise invalid("allowed_token_ids", "must have at least one token id, and none below 0")
            self.tokens_named["allowed_token_ids"] = value
            self.config.token_mask = AllowedTokens(value)

    def logprobs(self, value: int | None, param: str, name: str = "logprobs") -> None:
        """Sets the number of likeliest tokens to record in addition to the chosen one; None for no record."""
        check_range(param, value, 0, self.limits.top_logprobs)
        self.set(name, value, param)

    def _check_count(self, param: str, value: Any) -> None:
        if value is not None and len(value) > self.limits.token_lists:
            raise invalid(param, f"may have at most {self.limits.token_lists} entries, got {len(value)}")
