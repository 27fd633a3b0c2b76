"""The bytes of a token, which may be less than a character."""

from __future__ import annotations

import re
from typing import Any

from pace.checkpoints.vocabulary import BYTE_LETTERS

_LETTERS = {letter: byte for byte, letter in enumerate(BYTE_LETTERS)}
_BLANK = re.compile(r'Metaspace\(replacement="(.)"|Replace\(pattern=String\("(.)"\), content=" "\)')
_NAME = "_pace_token_bytes"
"""Attribute of a tokenizer with its table, which is freed with it."""


class TokenBytes:
    """Bytes of each token of one tokenizer, as `table[token]`. Looked up on first access."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", None) or {}
        flagged = [token for token, content in added.items() if getattr(content, "special", False)]
        self.special = frozenset([*getattr(tokenizer, "all_special_ids", ()), *flagged])
        """Tokens that decoding leaves out with `skip_special_tokens`."""
        self._added = {token: str(content) for token, content in added.items()}
        self._known: dict[int, bytes] = {}
        decoder = repr(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None))
        self._is_byte_level = "ByteLevel" in decoder
        """True if token names use the letters of byte-level BPE."""
        blank = _BLANK.search(decoder)
        self._blank = blank[1] or blank[2] if blank else "\u2581"
        self.has_blank_alone = blank is not None and "ByteFallback" not in decoder and not self._is_byte_level
        """True if token names are their text, except for a letter that stands for a blank."""

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes:
        """Returns the table of a tokenizer, cached per tokenizer."""
        if tokenizer is None:
            return cls(None)
        table = vars(tokenizer).get(_NAME)
        if table is None or table._tokenizer is not tokenizer:  # a copy has the table of its original
            table = cls(tokenizer)
            setattr(tokenizer, _NAME, table)
        return table

    def __getitem__(self, token: int) -> bytes:
        """Returns the bytes of a token; for a special token those of its name; b"" for ids beyond the tokenizer."""
        data = self._known.get(token)
        if data is None:
            data = self._known[token] = self._look_up(token)
        return data

    def text(self, token: int) -> str:
        """Returns the token as text, with U+FFFD for invalid UTF-8."""
        return self[token].decode("utf-8", "replace")

    def is_byte(self, token: int) -> bool:
        """True if the token's name is that of one byte, `<0x0A>`."""
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)
        return isinstance(name, str) and _is_byte_name(name)

    def _look_up(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode("utf-8", "replace")
        name = None if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):
            return b""
        if self._is_byte_level and all(letter in _LETTERS for letter in name):
            return bytes(_LETTERS[letter] for letter in name)
        if not self.has_blank_alone and _is_byte_name(name):
            return bytes.fromhex(name[3:5])
        return name.replace(self._blank, " ").encode("utf-8", "replace")


def _is_byte_name(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")
