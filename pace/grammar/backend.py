"""llguidance, which computes the token masks of all grammars. It is imported when a grammar is first used."""

from __future__ import annotations

import functools
import importlib.metadata
from types import ModuleType


def import_llguidance() -> ModuleType:
    """Returns the module. Raises ModuleNotFoundError with the command that installs it."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'grammars need llguidance: pip install "pace-llm[grammar]", or pip install "llguidance>=1.5,<2"'
        ) from None
    return llguidance


@functools.cache
def repeats_whitespace() -> bool:
    """True for llguidance before 1.8, which applies a whitespace pattern several times in one place."""
    try:
        version = importlib.metadata.version("llguidance")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) < (1, 8)


def problem_of(source: str) -> str:
    """Returns the reason why llguidance cannot compile a grammar for any vocabulary; "" if it can. Raises
    ModuleNotFoundError if llguidance is missing."""
    is_error, messages = import_llguidance().LLMatcher.validate_grammar_with_warnings(source)
    return messages[0] if is_error else ""


def gbnf_to_lark(text: str) -> str:
    """Converts a GBNF grammar to Lark. Raises what the converter raises."""
    import_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)
