"""Tokens of prompts."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kani import ChatMessage

from pace.integrations.kani.messages import text_of
from pace.llm.generator import Generator
from pace.llm.inputs import is_media_prompt, read_media_prompt, read_prompts
from pace.llm.preparation import model_name
from pace.llm.processors.prompts import MediaPart

MAX_TOKENS = 2**20
"""Maximum tokens of all cached texts together: 4 MB."""


class ReadPrompt(NamedTuple):
    """A prompt that was read."""

    tokens: list[int]
    inputs: Any
    """What the generator takes: the tokens, with their media if there are any."""
    text: str | None = None
    """The prompt as text; None if it was given as ids."""


class PromptReader:
    """Converts prompts in any form to tokens, and caches those of texts. Thread-safe."""

    def __init__(self, tokenizer: Any, generator: Generator) -> None:
        self._tokenizer = tokenizer
        self._generator = generator
        self._known: dict[str, array] = {}
        self._lock = threading.Lock()
        self._encode("a")  # applies a truncation setting of the tokenizer's file: afterwards threads may share it

    def read(self, prompt: Any) -> ReadPrompt:
        """Reads a text with the names of special tokens, a list or tensor of ids, or the output of a tokenizer or of a
        processor. Also reads a dict with a text as `prompt`, and its `images` and `audio`. No media are decoded.

        Raises TypeError and ValueError for anything else, and what `PromptEncoder.encode` raises."""
        if isinstance(prompt, str):
            return self.read_text(prompt, ())
        if is_media_prompt(prompt):
            return self.read_text(*read_media_prompt(prompt, "the prompt"))
        generator = self._generator
        model = generator.engine.model
        names = model.towers, model_name(model)
        read = read_prompts(prompt, None, model.vocab_size, *names, generator.encoder)
        if len(read.rows) != 1:
            raise ValueError(f"build_prompt must return one prompt, but it returned {len(read.rows)}")
        return ReadPrompt(read.rows[0], prompt if read.media else read.rows[0])

    def read_text(self, text: str, parts: Sequence[MediaPart]) -> ReadPrompt:
        """Reads a text with a placeholder for each of `parts`."""
        encoded = self._generator.encoder.encode(text, parts, self._known_tokens, add_special_tokens=False)
        return ReadPrompt(encoded.tokens, encoded, text)

    def _known_tokens(self, text: str, add_special_tokens: bool) -> Mapping[str, Any]:
        """The tokenizer, with its cache."""
        return {"input_ids": self._tokens_of(text)}

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
