"""The choice of windows from a text: those to calibrate on, and those that are kept for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pace.eval import encode, read_context, windows
from pace.llm.models.base_model import BaseModelForCausalLM

MAX_TOKENS = 32768
"""Of the text, where nobody says otherwise; twice as many gain little (arXiv 2210.17323 takes 262144, 2306.00978
less)."""

MIN_TOKENS = 256
"""A shorter text says too little of what channels are like."""

REPORT_SHARE, REPORT_TOKENS = 8, 8192
"""Every eighth window is kept from calibration for the report, up to so many tokens."""

CHARACTERS_A_TOKEN = 16
"""Of a text much longer than the tokens that are wanted, pieces are taken: tokenising 50 MB takes minutes and 7 GB.
Tokens have 3 to 6 characters, so that enough of them come."""


def choose_windows(
    texts: Sequence[str], tokenizer: Any, model: BaseModelForCausalLM, context: int | None, max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Windows to calibrate on, and those that are kept for the report: of fewer than eight windows one, unless that leaves
    too little to calibrate on. Raises ValueError for too few tokens."""
    context = read_context(context, model.max_position_embeddings)
    texts = _some(texts, CHARACTERS_A_TOKEN * max_tokens * REPORT_SHARE // (REPORT_SHARE - 1))
    found = list(windows(encode(texts, tokenizer, model.vocab_size), context))
    places = range(REPORT_SHARE - 1, len(found), REPORT_SHARE)
    if found and not places:
        longest = max(range(len(found)), key=lambda index: (len(found[index]), index))
        places = [longest] if sum(map(len, found)) - len(found[longest]) >= MIN_TOKENS else []
    kept = [found[index] for index in places]
    seen = [window for index, window in enumerate(found) if index not in places]
    if (count := sum(map(len, seen))) < MIN_TOKENS:
        raise ValueError(
            f"the text to calibrate on has {count} tokens; at least {MIN_TOKENS} are needed, and some thousands are better"
        )
    return _spread(seen, max_tokens), _spread(kept, REPORT_TOKENS)


def _some(texts: Sequence[Any], most: int) -> Sequence[Any]:
    """Texts, or rows of token ids, of about `most` characters in all: where there are more, pieces of them, evenly
    spread."""
    step, piece = -(-sum(map(len, texts)) // most), most // REPORT_SHARE
    if step <= 1:
        return texts
    return [text[start : start + piece] for text in texts for start in range(0, len(text), piece)][::step]


def _spread(found: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Windows of at most `max_tokens` in all, evenly spread."""
    step = -(-sum(map(len, found)) // max_tokens)
    return found[::step] if step > 1 else found
