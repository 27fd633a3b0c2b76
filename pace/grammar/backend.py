"""llguidance, which makes the masks of all grammars, and is imported where a grammar is first asked for."""

from __future__ import annotations

import functools
import importlib.metadata
import json
from types import ModuleType
from typing import Any


def import_llguidance() -> ModuleType:
    """llguidance. Raises ModuleNotFoundError that says how to get it."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'grammars need llguidance: pip install "pace-llm[grammar]", or pip install "llguidance>=1.5,<2"'
        ) from None
    return llguidance


@functools.cache
def repeats_whitespace() -> bool:
    """Whether llguidance takes a pattern of whitespace several times at one place, as it did before 1.8."""
    try:
        version = importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) < (1, 8)


def problem_of(schema: dict[str, Any]) -> str:
    """Why llguidance makes no grammar of a JSON schema; "" where it does, and where llguidance is missing."""
    try:
        matcher = import_llguidance().LLMatcher
    except ModuleNotFoundError:
        return ""
    is_error, messages = matcher.validate_grammar_with_warnings(json.dumps({"grammars": [{"json_schema": schema}]}))
    return messages[0] if is_error else ""


def gbnf_to_lark(text: str) -> str:
    """Lark of a GBNF grammar. Raises whatever the converter raises."""
    import_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)
