"""Compiles grammars for one model's vocabulary and caches them."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from pace.grammar import Grammar
from pace.grammar.backend import import_llguidance
from pace.llm.constraints.captures import CaptureReader, has_captures
from pace.llm.constraints.grammar_mask import GrammarMask, Usage, first_line
from pace.llm.text.token_bytes import TokenBytes
from pace.memory import allocated_bytes

CACHE_BYTES = 64 * 2**20
"""Estimated size up to which compiled grammars are cached."""

_WORK: dict[str, int] = {"step_lexer_fuel": 200_000, "step_max_items": 50_000, "max_items_in_row": 4_608}
"""llguidance's limits of the work for one mask: about 15 ms, and 0.15 s if a row has the maximum of items. An optional
property is four items (`GrammarLimits.max_optional`)."""


_BYTES_PER_SECOND = 128 * 2**20
"""Upper bound of the memory allocated per second of compiling. At most 75 MB were measured, for a long constant."""


@dataclass(frozen=True)
class CompiledGrammar:
    """A compiled grammar for one vocabulary, at its start."""

    matcher: Any
    """An `LLMatcher`, to be copied."""
    warnings: tuple[str, ...]
    """Parts of a JSON schema that are not enforced, if it is not `strict`."""
    start_bytes: int
    """Measured size after compiling, in bytes."""
    usage: Usage = field(default_factory=Usage, compare=False)

    @property
    def num_bytes(self) -> int:
        """Measured size after compiling plus estimated growth by use: about 2 KiB per token, until the lexer's states
        repeat. (Measured with JSON schemas of many kinds, vocabularies of 2,000 to 152,000.)"""
        return self.start_bytes + min(2**11 * self.usage.num_tokens, 2**21)


class GrammarCompiler:
    """Compiles grammars for one tokenizer and model. Thread-safe: concurrent calls for one grammar compile it once."""

    def __init__(self, tokenizer: Any, vocab_size: int, cache_bytes: int = CACHE_BYTES) -> None:
        """Cheap: the vocabulary table is made on first use."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._table: Future[Any] | None = None
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._in_use: WeakValueDictionary[str, CompiledGrammar] = WeakValueDictionary()

    def start(self) -> None:
        """Makes the table in the background, so that the first grammar need not wait for it. Raises nothing; errors are
        raised for the first grammar."""
        threading.Thread(target=lambda: self._table_future().exception(), name="pace-grammars", daemon=True).start()

    @property
    def table(self) -> Any:
        """llguidance's table of the vocabulary (`make_table`), made once. Raises what `make_table` does."""
        return self._table_future().result()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Returns the compiled grammar if it is cached or in use; None if it must be compiled."""
        with self._lock:
            found = self._compiled.get(grammar.source)
            if found is not None and found.done() and found.exception() is None:
                if found.result().usage.has_failed:  # it may fail other sequences, for which a new one would work
                    del self._compiled[grammar.source]
                    return None
                self._compiled.move_to_end(grammar.source)
                return found.result()
            in_use = self._in_use.get(grammar.source)
            return None if in_use is None or in_use.usage.has_failed else in_use

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar, compiling it if needed. Raises ValueError for a grammar that llguidance
        refuses, that allows nothing, or that this tokenizer cannot serve. Raises ModuleNotFoundError if llguidance is
        missing."""
        table = self.table
        if (known := self.find(grammar)) is not None:
            return known
        with self._lock:
            found = self._compiled.get(grammar.source)
            if found is None:
                mine = self._compiled[grammar.source] = Future()
        if found is not None:
            return found.result()
        try:
            compiled = _compile(grammar, table)
        except BaseException as error:
            with self._lock:
                self._compiled.pop(grammar.source, None)
            mine.set_exception(error)
            raise
        mine.set_result(compiled)
        self._in_use[grammar.source] = compiled
        self._make_room()
        return compiled

    def mask(self, grammar: Grammar, end_tokens: list[int]) -> GrammarMask:
        """Returns a mask at the grammar's start, to be forked. Raises what `compile` does."""
        compiled, table_ends = self.compile(grammar), _ends(self.table)
        other_ends = tuple(table_ends - set(end_tokens))
        return GrammarMask(compiled.matcher, tuple(end_tokens), other_ends, compiled.usage)

    def captures(self, grammar: Grammar) -> CaptureReader | None:
        """Returns the reader of the grammar's captures; None if it has none. Raises what `compile` does, and ValueError
        if llguidance is too old for captures."""
        if not has_captures(grammar):
            return None
        return CaptureReader(self.compile(grammar).matcher, self._table_future().result(), self._tokenizer)

    def _table_future(self) -> Future[Any]:
        with self._lock:
            is_mine = self._table is None
            if is_mine:
                self._table = Future()
            table = self._table
        if is_mine:
            try:
                table.set_result(make_table(self._tokenizer, self._vocab_size))
            except BaseException as error:
                table.set_exception(error)
                if not isinstance(error, (ValueError, ModuleNotFoundError)):
                    with self._lock:
                        self._table = None
        return table

    def _make_room(self) -> None:
        with self._lock:
            done = {source: future for source, future in self._compiled.items() if future.done()}
            total = sum(future.result().num_bytes for future in done.values() if future.exception() is None)
            for source, future in done.items():
                if total <= self.cache_bytes or len(self._compiled) == 1:
                    break
                if future.exception() is None:
                    total -= future.result().num_bytes
                    del self._compiled[source]


def make_table(tokenizer: Any, vocab_size: int) -> Any:
    """Returns llguidance's table of a transformers tokenizer, as wide as the model's logits: an `LLTokenizer`. Takes
    from milliseconds to seconds. Raises ValueError for a tokenizer that it cannot read or that has more tokens than the
    model."""
    if tokenizer is None:
        raise ValueError("grammars are about text, and this model has no tokenizer; give tokenizer_name_or_path")
    library = import_llguidance()
    end = tokenizer.eos_token_id
    try:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and not TokenBytes.of(tokenizer).has_blank_alone:  # llguidance cannot read the others
            return library.LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=end)
        return library.LLTokenizer(library.TokenizerWrapper(_ByteTokens(tokenizer)), n_vocab=vocab_size)
    except Exception as error:
        raise ValueError(f"grammars do not work with this tokenizer: {error}") from None


class _ByteTokens:
    """Adapts a tokenizer that llguidance cannot read by itself: provides the bytes of each token."""

    def __init__(self, tokenizer: Any) -> None:
        table = TokenBytes.of(tokenizer)
        self._encode = encoder_within(tokenizer)
        self.eos_token_id = tokenizer.eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.all_special_ids)
        self.tokens = [table[token] for token in range(len(tokenizer))]

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def encoder_within(tokenizer: Any) -> Callable[[str], list[int]]:
    """Returns a function that tokenizes text in the middle of a text: without the blank that some tokenizers put before
    it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: tokenizer.encode(text, add_special_tokens=False)
    state = json.loads(backend.to_str())
    waiting = [state.get("pre_tokenizer")]
    while waiting:
        part = waiting.pop() or {}
        waiting += part.get("pretokenizers", ())
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
    normalizer = state.get("normalizer") or {}
    if normalizer.get("type") == "Prepend":
        state["normalizer"] = None
    elif normalizer.get("type") == "Sequence":
        normalizer["normalizers"] = [part for part in normalizer["normalizers"] if part["type"] != "Prepend"]
    plain = type(backend).from_str(json.dumps(state))
    return lambda text: plain.encode(text, add_special_tokens=False).ids


def _ends(table: Any) -> set[int]:
    return set(getattr(table, "eos_tokens", ())) or {table.eos_token}


def _compile(grammar: Grammar, table: Any) -> CompiledGrammar:
    bytes_before, seconds_before = allocated_bytes(), time.thread_time()
    matcher, error = _start(grammar.source, table)
    if error:
        raise grammar.refusal(error, lambda source: _start(source, table)[1])
    num_bytes = allocated_bytes() - bytes_before  # other threads allocate and free meanwhile, so it is clamped
    least = 2**16 + 48 * len(grammar.source)
    most = 2**20 + least + int(_BYTES_PER_SECOND * (time.thread_time() - seconds_before))
    return CompiledGrammar(matcher, tuple(matcher.get_grammar_warnings()), min(max(num_bytes, least), most))


def _start(source: str, table: Any) -> tuple[Any, str]:
    """Returns a matcher at the start of a grammar, and why it cannot be used, or "" if it can."""
    library = import_llguidance()
    limits = library.LLParserLimits(verbose_errors=False, **_WORK)
    matcher = library.LLMatcher(table, source, log_level=0, limits=limits)
    words = np.zeros(-(-table.vocab_size // 32), np.uint32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(
            words.ctypes.data, words.nbytes
        )  # the first mask is the slowest: copies share it
    if matcher.is_error():
        return matcher, first_line(matcher.get_error())
    for end in _ends(table):
        words[end >> 5] &= ~np.uint32(1 << (end & 31))
    if matcher.is_stopped() or not words.any():
        return matcher, "nothing but the empty text satisfies it, or no text at all"
    within = matcher.deep_copy()  # at the start of an object there may be more items than fit
    if within.try_consume_tokens(table.tokenize_str("{")):
        within.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    return matcher, first_line(within.get_error()) if within.is_error() else ""
