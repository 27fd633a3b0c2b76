"""Tokens of texts and of pairs of texts: special tokens, token types, truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Encoding, normalizers
from tokenizers import Tokenizer as Backend

from pace.llm.encoding.embedder import TextTokens
from pace.naming import check_text
from pace.tokenizer.tokenizer import Tokenizer

Pair = tuple[str, str]

SLICE = 256
"""Texts that are tokenised at once, so that the threads of the tokenizer do not run for long."""


class TextEncoder:
    """Tokenises texts and pairs as the tokenizer of the checkpoint does. Thread-safe."""

    def __init__(self, tokenizer: Any, max_length: int, has_types: bool = False, lower_case: bool = False):
        """`max_length`: maximum number of tokens of a text or pair. `has_types`: True if the model distinguishes token
        types. `lower_case`: True to turn texts into lower case, also where the tokenizer does not."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise NotImplementedError(
                f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json; give tokenizer_name_or_path, a "
                "checkpoint that has one, or token ids instead of texts"
            )
        if lower_case or not isinstance(tokenizer, Tokenizer):
            backend = _copied(backend, getattr(tokenizer, "split_special_tokens", False))
        if lower_case:
            backend.normalizer = _after_lower_case(backend.normalizer)
        self._backend = backend
        self._direction = getattr(tokenizer, "truncation_side", "right")
        self._has_types = has_types and "token_type_ids" in tokenizer.model_input_names
        self.max_length = max_length

    def texts(self, texts: Sequence[str], truncate: bool) -> list[TextTokens]:
        """Returns the tokens of each text. With `truncate`, cuts longer texts at their end. Raises ValueError for
        invalid Unicode, and for a text that is too long otherwise."""
        for index, text in enumerate(texts):
            check_text(text, f"text {index}")
        return self._encode(list(texts), truncate)

    def pairs(self, pairs: Sequence[Pair], truncate: bool) -> list[TextTokens]:
        """Returns the tokens of each pair. With `truncate`, cuts the longer text of a pair first. Raises as
        `texts`."""
        for index, (first, second) in enumerate(pairs):
            check_text(first, f"the first text of pair {index}")
            check_text(second, f"the second text of pair {index}")
        return self._encode(list(pairs), truncate)

    def _encode(self, inputs: list[str] | list[Pair], truncate: bool) -> list[TextTokens]:
        found = []
        for first in range(0, len(inputs), SLICE):
            some = inputs[first : first + SLICE]
            for index, encoding in enumerate(self._backend.encode_batch(some), first):
                if len(encoding.ids) > self.max_length:
                    if not truncate:
                        raise TooLong(index, len(encoding.ids), self.max_length)
                    encoding = self._truncated(inputs[index])
                found.append(TextTokens(tuple(encoding.ids), self._types(encoding)))
        return found

    def _types(self, encoding: Encoding) -> tuple[int, ...] | None:
        types = encoding.type_ids
        return tuple(types) if self._has_types and any(types) else None

    def _truncated(self, given: str | Pair) -> Encoding:
        """Encodes a text or pair that is too long, cut before its special tokens are added."""
        parts = [given] if isinstance(given, str) else list(given)
        encodings = [self._backend.encode(part, add_special_tokens=False) for part in parts]
        room = self.max_length - self._backend.num_special_tokens_to_add(len(parts) == 2)
        if room < len(parts):
            raise ValueError(
                f"max_seq_len={self.max_length} has no room for a text next to the special tokens; raise it"
            )
        lengths = fit_lengths([len(encoding.ids) for encoding in encodings], room)
        for encoding, length in zip(encodings, lengths):
            encoding.truncate(length, direction=self._direction)
        return self._backend.post_process(*encodings)


def fit_lengths(lengths: list[int], room: int) -> list[int]:
    """Returns the lengths after cutting the longest first, until they fit in `room`. Of equal ones, the last is cut
    last, as in transformers."""
    if len(lengths) == 1:
        return [min(lengths[0], room)]
    short, long = sorted(lengths)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = short + room % 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


class TooLong(ValueError):
    """The error for a text or pair with too many tokens."""

    def __init__(self, index: int, length: int, most: int) -> None:
        super().__init__(
            f"text {index} has {length} tokens, more than the {most} of this model; shorten it, or pass truncate=True"
        )
        self.index = index
        self.length = length


def _copied(backend: Backend, splits_special_tokens: bool) -> Backend:
    """A copy without the padding and truncation that the file may ask for."""
    copy = Backend.from_str(backend.to_str())
    copy.no_padding()
    copy.no_truncation()
    copy.encode_special_tokens = splits_special_tokens
    return copy


def _after_lower_case(normalizer: Any) -> Any:
    """A normalizer that first turns texts into lower case, as sentence-transformers does. Special tokens stay."""
    lower = normalizers.Lowercase()
    return lower if normalizer is None else normalizers.Sequence([lower, normalizer])
