"""What a text may be: JSON of a schema, a regular expression, a context-free grammar, one of some strings."""

from pace.grammar.grammar import Grammar
from pace.grammar.limits import GrammarLimits

__all__ = ["Grammar", "GrammarLimits"]
