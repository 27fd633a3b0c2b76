"""Grammars that constrain a text: a JSON schema, a regular expression, a context-free grammar, a choice of strings."""

from pace.grammar.grammar import GivenSchema, Grammar, GrammarError
from pace.grammar.limits import GrammarLimits

__all__ = ["GivenSchema", "Grammar", "GrammarError", "GrammarLimits"]
