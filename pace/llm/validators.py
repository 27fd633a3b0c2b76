"""Checks of a caller's values. Each takes the name used in error messages, and the value. It returns the value in
canonical form, or raises an error that explains what is allowed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from pace.grammar import Grammar

Check = Callable[[str, Any], Any]


def integer(minimum: int, maximum: int | None = None, hint: str = "") -> Check:
    allowed = f"an int >= {minimum}" if maximum is None else f"an int in [{minimum}, {maximum}]"

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}){hint}")
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(f"{name} must be {allowed}, got {value}{hint}")
        return int(value)

    return check


def number(minimum: float, maximum: float = math.inf, exclusive: bool = False, hint: str = "") -> Check:
    bounds = f" in {'(' if exclusive else '['}{minimum:g}, {maximum:g}]"
    if maximum == math.inf:
        bounds = "" if minimum == -math.inf else f" {'>' if exclusive else '>='} {minimum:g}"
    allowed = f"a finite number{bounds}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(f"{name} must be {allowed}, got {value!r} ({type(value).__name__}){hint}")
        try:
            value = float(value)
        except OverflowError:  # an int beyond the largest float
            value = math.inf
        if not math.isfinite(value) or value < minimum or value > maximum or (exclusive and value == minimum):
            raise ValueError(f"{name} must be {allowed}, got {value!r}{hint}")
        return value

    return check


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r} ({type(value).__name__})")
    return value


def early_stopping(name: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise ValueError(f'{name} must be True, False or "never", got {value!r}')
    return value


def token_list(name: str, value: Any) -> list[int]:
    """One id or several, as a list without repetitions."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    ids = list(value) if isinstance(value, (list, tuple, set)) else [value]
    if not ids:
        raise ValueError(
            f"{name} must name at least one token; leave it out for the model's own, or set ignore_eos=True for none"
        )
    check = integer(0, hint="; set ignore_eos=True to generate past the end token")
    return list(dict.fromkeys(check(name, token) for token in ids))


def banned_tokens(name: str, value: Any) -> list[int]:
    """A list of ids, without repetitions. It may be empty."""
    return token_list(name, value) if value not in ([], ()) else []


def strings(name: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple, set)) or not all(isinstance(item, str) for item in items):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if not all(items):
        raise ValueError(f"{name} holds an empty string, which every text contains; remove it")
    return list(items)


def token_sequences(name: str, value: Any) -> list[list[int]]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, (list, tuple)) for word in value):
        raise TypeError(f"{name} must be a list of lists of token ids, got {value!r}")
    if not value or not all(value):
        raise ValueError(f"{name} must be a non-empty list of non-empty lists of token ids, got {value!r}")
    return [[integer(0)(name, token) for token in word] for word in value]


def logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of token id to bias, got {value!r}")
    checked = {}
    for token, bias in value.items():
        token = integer(0)(f"a token id in {name}", token)
        if not (isinstance(bias, float) and bias == -math.inf):
            bias = number(-math.inf, hint=" (or -inf, which bans the token)")(f"{name}[{token}]", bias)
        checked[token] = bias
    return checked


def logprobs(name: str, value: Any) -> int | None:
    """Number of alternatives to return: True is 0 (only the chosen token), False is None (no log-probabilities)."""
    if isinstance(value, bool):
        return 0 if value else None
    return integer(0)(name, value)


def callables(name: str, value: Any) -> list[Callable]:
    items = [value] if callable(value) else value
    if not isinstance(items, (list, tuple)) or not all(callable(item) for item in items):
        raise TypeError(
            f"{name} must be a list of pace.llm.LogitsProcessor, or of callables as transformers has them: "
            f"(input_ids [1, S], logits [1, V]) -> logits; got {value!r}"
        )
    return list(items)


def callback(name: str, value: Any) -> Callable:
    if not callable(value):
        raise TypeError(f"{name} must be a callable that takes a pace.llm.StepContext, got {value!r:.100}")
    return value


def token_mask(name: str, value: Any) -> Any:
    methods = ("fill", "accept", "rollback", "count_allowed", "forced", "fork")
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        raise TypeError(f"{name} must be a pace.llm.TokenMask, such as AllowedTokens([...]); got {value!r:.200}")
    return value


def readable(read: Callable[[Any], Any]) -> Check:
    """Returns the check of a value that `read` must accept. The value stays as it is."""

    def check(name: str, value: Any) -> Any:
        read(value)
        return value

    return check


def grammar(name: str, value: Any) -> Grammar:
    return value if isinstance(value, Grammar) else Grammar.read(value)


def choices(name: str, value: Any) -> list[str]:
    Grammar.choices(value)
    return list(value)
