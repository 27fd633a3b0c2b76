"""Tokens of prompts."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

from kani import ChatMessage

from pace.integrations.kani.messages import text_of
from pace.llm.inputs import read_prompts

MAX_TOKENS = 2**20
"""Maximum tokens of all cached texts together: 4 MB."""


class PromptReader:
    """Converts prompts in any form to tokens, and caches those of texts. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: dict[str, array] = {}
        self._lock = threading.Lock()
        self._encode("a")  # applies a truncation setting of the tokenizer's file: afterwards threads may share it

    def read(self, prompt: Any) -> list[int]:
        """Returns the tokens of a text with the names of special tokens, of a list or tensor of ids, or of a
        tokenizer's output. Raises TypeError and ValueError for anything else."""
        if isinstance(prompt, str):
            return self._tokens_of(prompt).tolist()
        rows = read_prompts(prompt, None, self._vocab_size).rows
        if len(rows) != 1:
            raise ValueError(f"build_prompt must return one prompt, but it returned {len(rows)}")
        return rows[0]

    def count_beyond(self, messages: Sequence[ChatMessage], limit: int) -> int:
        """Number of tokens of the messages without the template's text, if that is more than `limit`; else 0. Fast for
        messages that were counted before."""
        texts = [(text_of(message) or "").strip() for message in messages]
        if sum(map(len, texts)) <= limit:  # a token rarely has less than a character, and the exact count follows
            return 0
        num_tokens = sum(len(self._tokens_of(text)) for text in texts)
        return num_tokens if num_tokens > limit else 0

    def _tokens_of(self, text: str) -> array:
        if (known := self._known.get(text)) is not None:
            return known
        tokens = array("i", self._encode(text))
        with self._lock:
            if sum(map(len, self._known.values())) + len(tokens) > MAX_TOKENS:
                self._known.clear()
            if len(tokens) <= MAX_TOKENS:
                self._known[text] = tokens
        return tokens

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
