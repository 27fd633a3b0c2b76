"""What a text may be: JSON of a schema, a regular expression, a context-free grammar, one of some strings."""

from pace.grammar.grammar import GivenSchema, Grammar, GrammarError
from pace.grammar.limits import GrammarLimits

__all__ = ["GivenSchema", "Grammar", "GrammarError", "GrammarLimits"]
