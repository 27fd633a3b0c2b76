"""llguidance, which makes the masks of all grammars, and is imported where a grammar is first asked for."""

from __future__ import annotations

from types import ModuleType


def import_llguidance() -> ModuleType:
    """llguidance. Raises ModuleNotFoundError that says how to get it."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'grammars need llguidance: pip install "pace-llm[grammar]", or pip install "llguidance>=1.5,<2"'
        ) from None
    return llguidance


def gbnf_to_lark(text: str) -> str:
    """Lark of a GBNF grammar. Raises whatever the converter raises."""
    import_llguidance()
    from llguidance.gbnf_to_lark import any_to_lark

    return any_to_lark(text)
