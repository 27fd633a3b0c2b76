"""Prompts of conversations: text from the chat template, tokens from the tokenizer."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from kani import AIFunction, ChatMessage

from pace.integrations.kani.messages import as_dict, as_tools, text_of
from pace.llm.chat import ToolFormat
from pace.llm.chat.template import ChatTemplate
from pace.llm.inputs import read_prompts

MOST_TOKENS = 2**20
"""Maximum tokens of all cached prompts together: 4 MB."""
MOST_MESSAGES = 1024
"""Number of messages whose token counts are cached."""
NUM_LAST = 32
"""Number of last tokens of a prompt that are decoded to see if it begins reasoning."""
REASONING_KEYS = ("reasoning_content", "thinking")
"""Keys under which chat templates look for the reasoning of a message."""


class TemplatePrompts:
    """Renders conversations with a chat template."""

    def __init__(
        self, tokenizer: Any, format: ToolFormat | None, reasoning_key: str | None, variables: Mapping[str, Any]
    ) -> None:
        """`variables` are passed to the template. Raises ValueError for a tokenizer without a template."""
        self.template = ChatTemplate(tokenizer, format)
        self._reasoning_key = reasoning_key or next(filter(self._is_shown, REASONING_KEYS), None)
        self._variables = dict(variables)

    def __call__(self, messages: Sequence[ChatMessage], functions: Sequence[AIFunction] | None = None) -> str:
        """Renders a conversation, up to the beginning of the answer."""
        dicts = [as_dict(message, self._reasoning_key) for message in messages]
        return self.template.render(dicts, as_tools(functions), variables=self._variables)

    def _is_shown(self, key: str) -> bool:
        return re.search(rf"\.{key}\b|['\"]{key}['\"]", self.template.source) is not None


class PromptReader:
    """Converts prompts in any form to tokens, and caches the last ones. Thread-safe."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._known: OrderedDict[str, array] = OrderedDict()
        self._num_known = 0
        self._lock = threading.Lock()
        self.num_tokens = lru_cache(MOST_MESSAGES)(lambda text: len(self._encode(text)))
        """Number of tokens of a text on its own."""
        self._encode("a")  # applies a truncation setting of the tokenizer's file: afterwards threads may share it

    def read(self, prompt: Any) -> list[int]:
        """Returns the tokens of a text with the names of special tokens, of a list or tensor of ids, or of a
        tokenizer's output. Raises TypeError and ValueError for anything else."""
        if not isinstance(prompt, str):
            rows = read_prompts(prompt, None, self._vocab_size).rows
            if len(rows) != 1:
                raise ValueError(f"build_prompt must give one prompt, and gave {len(rows)}")
            return rows[0]
        with self._lock:
            if (known := self._known.get(prompt)) is not None:
                self._known.move_to_end(prompt)
                return known.tolist()
        tokens = self._encode(prompt)
        self._remember(prompt, array("i", tokens))
        return tokens

    def end_of(self, prompt: Any, tokens: list[int]) -> str:
        """The text at the end of a prompt."""
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(tokens[-NUM_LAST:])

    def are_too_long(self, messages: Sequence[ChatMessage], most: int) -> int:
        """Number of tokens of the messages without the template's text, if that is more than `most`; else 0. Fast for
        messages that were counted before."""
        texts = [(text_of(message) or "").strip() for message in messages]
        if sum(map(len, texts)) <= most:  # a token rarely has less than a character, and the exact count follows
            return 0
        num_tokens = sum(map(self.num_tokens, texts))
        return num_tokens if num_tokens > most else 0

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _remember(self, prompt: str, tokens: array) -> None:
        with self._lock:
            if prompt in self._known or len(tokens) > MOST_TOKENS:
                return
            self._known[prompt] = tokens
            self._num_known += len(tokens)
            while self._num_known > MOST_TOKENS:
                self._num_known -= len(self._known.popitem(last=False)[1])
