"""Chooses windows of a text: some to calibrate on, others for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pace.eval import encode, read_context, windows
from pace.llm.models.base_model import BaseModelForCausalLM

MAX_TOKENS = 32768
"""Default number of calibration tokens. Twice this number gains little (arXiv 2210.17323 uses 262144, 2306.00978
fewer)."""

MIN_TOKENS = 256
"""A shorter text gives poor statistics of the channels."""

REPORT_SHARE, REPORT_TOKENS = 8, 8192
"""Every eighth window is kept for the report, up to REPORT_TOKENS tokens."""

CHARACTERS_A_TOKEN = 16
"""Characters read per wanted token. Pieces are taken from a longer text, because tokenising 50 MB takes minutes and 7
GB. Tokens have 3 to 6 characters, so this gives enough tokens."""


def choose_windows(
    texts: Sequence[str], tokenizer: Any, model: BaseModelForCausalLM, context: int | None, max_tokens: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the windows to calibrate on, and those kept for the report. If there are fewer than eight windows, the
    longest is kept, unless that leaves too few tokens. Raises ValueError for too few tokens."""
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
            f"the text to calibrate on has {count} tokens; at least {MIN_TOKENS} are needed, better some thousands"
        )
    return _spread(seen, max_tokens), _spread(kept, REPORT_TOKENS)


def _some(texts: Sequence[Any], limit: int) -> Sequence[Any]:
    """Texts or rows of token ids, about `limit` characters or ids in all. Longer texts are cut to evenly spread
    pieces."""
    step, piece = -(-sum(map(len, texts)) // limit), limit // REPORT_SHARE
    if step <= 1:
        return texts
    return [text[start : start + piece] for text in texts for start in range(0, len(text), piece)][::step]


def _spread(found: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Evenly spread windows with about `max_tokens` tokens in all."""
    step = -(-sum(map(len, found)) // max_tokens)
    return found[::step] if step > 1 else found
