"""Text of users in chat templates, encoded so that it cannot contain control tokens.

A client may write `<|im_end|>` into a message. Usually it becomes the token that ends a turn. `ControlTokens` puts
marks around such words before the template is rendered, and encodes the marked words as ordinary text. The template's
own control tokens are not marked. The ids are those of transformers with `sanitize_control_tokens=True`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pace.tokenizer.jinja import literals_of

START, END = "\U000f0000", "\U000f0001"
"""Marks around a word of a user that names a token, from a private area of Unicode."""


class ControlTokens:
    """The control tokens of a tokenizer and a template."""

    def __init__(self, tokenizer: Any, template: str, others: Sequence[str] = ()) -> None:
        """`others`: words that are control tokens although the vocabulary lacks them."""
        added = tokenizer.added_tokens_decoder
        self._ids = {token.content: index for index, token in added.items()}
        named = getattr(tokenizer, "chat_control_tokens", None)
        if named is None:
            text = literals_of(template)
            is_control = lambda word: word in text and not word.isspace()
        else:
            is_control = set(named).__contains__
        words = [token.content for token in added.values() if token.special or is_control(token.content)]
        self._tokenizer = tokenizer
        self._words = _any_of([*words, *others])
        self._marked = re.compile(f"{START}({_any_of([*self._ids, *others]).pattern}){END}|[{START}{END}]")
        self._newline: list[int] = tokenizer.encode("\n", add_special_tokens=False)

    def marked(self, value: Any) -> Any:
        """Returns a value of a template with marks in all its texts. Keys of objects stay as they are."""
        if isinstance(value, str):
            return self._words.sub(f"{START}\\g<0>{END}", value.replace(START, "").replace(END, ""))
        if isinstance(value, Mapping):
            return {key: self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a rendered text. Each mark divides the text, also one that a template has
        separated from its partner. Raises ValueError for a word that the tokenizer cannot write without its control
        token."""
        first, *pieces = self._marked.split(text)
        ids = list(self._tokenizer.encode(first, add_special_tokens=False))
        for index, piece in enumerate(pieces):
            if not piece:
                continue
            is_marked = index % 2 == 0
            found = self._encode_after(piece, self._as_text if is_marked else self._as_usual)
            if is_marked and self._ids.get(piece) in found:
                raise ValueError(f"the text {piece!r} cannot be encoded without the control token of that name")
            ids += found
        return ids

    def _encode_after(self, piece: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Encodes the continuation of a text: after a line end, as some tokenizers put a space before a text."""
        found = encode("\n" + piece)
        num_before = len(self._newline)
        return found[num_before:] if found[:num_before] == self._newline else encode(piece)

    def _as_usual(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _as_text(self, text: str) -> list[int]:
        """Encodes a text without any added token."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]


def _any_of(words: Sequence[str]) -> re.Pattern[str]:
    """Matches any of the words, the longest first; nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")
