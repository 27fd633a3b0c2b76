"""Grammars compiled for the bundled model's tokenizer."""

from __future__ import annotations

import functools

from pace.assets import TINY
from pace.grammar import Grammar
from pace.llm.constraints.grammars import GrammarCompiler
from pace.tokenizer.loading import load_tokenizer


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(TINY), 2064)


def takes(grammar: Grammar, text: str) -> bool:
    """True if the grammar accepts the text."""
    matcher = compiler().compile(grammar).matcher.deep_copy()
    tokens = compiler().table.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
