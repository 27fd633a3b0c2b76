"""Sessions: sequences controlled by the caller, who appends tokens, reads logits, truncates and forks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.clients import saved_session
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.inputs import Prompts
from pace.llm.sampling.sampler import Collector
from pace.llm.sequence import AdapterKey, NullSink, Sequence
from pace.llm.text.stopping_criteria import NeverStops
from pace.media.media import MediaSpan
from pace.memory import available_memory_bytes, format_bytes

MediaReader = Callable[[Mapping[str, Any], bool], Prompts]
"""Reads a text and its media, or the arrays of a processor. The flag is True at the start of a session."""
Appended = Iterable[int] | Tensor | Prompts | Mapping[str, Any]
"""What a session appends: token ids, one prompt that was read before, or what a `MediaReader` reads."""

MANY_BYTES = 64 << 20
"""Below this size, available memory is not checked: that takes as long as a decode step of a small model."""


def logits_collector(first: int, num_rows: int, vocab_size: int) -> Collector:
    """Returns a strategy whose outcome is the logits of positions `first .. first + num_rows - 1`."""
    rows = torch.empty(num_rows, vocab_size)

    def collect(ops: Any, logits: Tensor, position: int) -> Tensor | None:
        begin, end = position - first, position - first + logits.shape[0]
        if logits.numpy().min() == -math.inf:
            raise ValueError(
                f"the model's logits are not finite: some are -inf, after {position + 1} to {first + end} tokens"
            )
        rows[begin:end] = logits
        return rows if end == num_rows else None

    return Collector(collect)


class OutcomeSink(NullSink):
    """Sets an error on the outcome of a sequence's strategy if the sequence ends without one."""

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        if sequence.strategy is not None and not sequence.strategy.outcome.done():
            sequence.strategy.outcome.set_exception(error or ValueError("this session was closed while it computed"))


class Session:
    """Tokens whose keys and values are kept between calls.

    Made by `LLMModel.session()`. Call `close`, or use it in a `with` block, to free its memory. When memory is short,
    the cached part of an idle session may be dropped; the next `append` recomputes it, with the same result. One
    session belongs to one thread at a time. Different sessions, and generations, may run at once.
    """

    _is_closed = True  # until it is made, which Ctrl-C may prevent

    def __init__(
        self,
        driver: EngineDriver,
        cache_salt: str | None = None,
        adapter: AdapterKey = (),
        read_media: MediaReader | None = None,
    ) -> None:
        """`cache_salt` as in `LLMModel.add_request`. `adapter` has loaded adapters. `read_media` is the reader of
        mappings."""
        self._driver = driver
        self._read_media = read_media
        self._sequence = Sequence([], strategy=None, stopping=NeverStops(), max_length=driver.engine.max_length)
        self._sequence.sink = OutcomeSink()
        self._sequence.cache_salt, self._sequence.adapter = cache_salt, adapter
        self._is_closed = False  # before the wait, which Ctrl-C may interrupt
        self._run(lambda engine: engine.scheduler.park(self._sequence))

    @property
    def tokens(self) -> list[int]:
        """A copy of all tokens so far."""
        return list(self._sequence.tokens)

    def __len__(self) -> int:
        return len(self._sequence.tokens)

    @property
    def media(self) -> tuple[MediaSpan, ...]:
        """The images and clips so far, and the tokens that stand for them."""
        return self._sequence.media

    def append(self, ids: Appended, logits: str | int = "last") -> Tensor:
        """Appends tokens and returns fp32 logits `[rows, vocab]` after the wanted tokens, one row each.

        `ids` may also be `{"prompt": text, "images": [...], "audio": [...]}`, or the arrays of the checkpoint's
        processor (`generate`). A text gets special tokens only at the start of a session.
        `logits`: "last" for the last token (1 row), "all" for every token of `ids`, an int k for the last k of them.
        Rope scaling that depends on the prompt's length (dynamic, longrope) uses the length of the first append.

        Raises ValueError for no ids, ids outside the vocabulary, more tokens than the context holds, k out of `1 ..
        len(ids)`, or logits that are not finite. The same for images and sound that the model does not take or cannot
        read. Raises MemoryError for more rows of logits than memory holds. After an
        error or Ctrl-C the session is unchanged.
        """
        return append_each([(self, ids)], logits)[0]

    def _plan(self, ids: Appended, logits: str | int) -> tuple[Callable[[Engine], None], Collector]:
        """Checks an append. Returns the function that starts it on the engine's thread, and the strategy that collects
        its logits."""
        self._check_open()
        ids, media = self._with_media(ids)
        ids = self._checked_ids(ids)
        num_rows = self._num_rows(logits, len(ids))
        self._check_room(num_rows)
        sequence, length = self._sequence, len(self)
        first = length + len(ids) - num_rows
        strategy = logits_collector(first, num_rows, self._driver.engine.model.vocab_size)

        def begin(engine: Engine) -> None:
            sequence.strategy, sequence.error, sequence.finish_reason = strategy, None, None
            sequence.tokens.extend(ids)
            sequence.media += tuple(replace(span, start=span.start + length) for span in media)
            sequence.num_prompt_tokens = sequence.num_prompt_tokens or len(ids)
            sequence.wanted_from = first
            engine.scheduler.add(sequence)

        return begin, strategy

    def truncate(self, num_tokens: int) -> None:
        """Drops all but the first `num_tokens` tokens. Raises ValueError if there are fewer, or if this would leave a
        part of an image or clip."""
        self._check_open()
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, numbers.Integral):
            raise TypeError(f"truncate takes the number of tokens to keep, an int; got {num_tokens!r}")
        if not 0 <= num_tokens <= len(self):
            raise ValueError(f"truncate takes the number of tokens to keep, 0 to {len(self)}; got {num_tokens}")
        for start, end in _extents(self.media):
            if start < num_tokens < end:
                raise ValueError(
                    f"the tokens {start} to {end - 1} are an image or a clip, which truncate keeps or drops as a "
                    f"whole; got {num_tokens}"
                )
        self._run(lambda engine: self._cut(engine, num_tokens))

    def fork(self) -> Session:
        """Returns a second session with the same tokens. Cached blocks are shared until one of the two writes to
        them."""
        self._check_open()
        fork = Session(self._driver, self._sequence.cache_salt, self._sequence.adapter, self._read_media)
        source, target = self._sequence, fork._sequence

        def share(engine: Engine) -> None:
            target.tokens, target.media = list(source.tokens), source.media
            target.num_prompt_tokens = source.num_prompt_tokens
            engine.cache.fork(source, target, source.num_computed)

        self._run(share)
        return fork

    def save(self, path: str | Path, note: bytes = b"") -> None:
        """Writes the tokens and what the cache holds of them to a file, for `LLMModel.load_session`. Replaces an
        earlier file at once, when the new one is complete. The session is unchanged. Cached parts that were dropped are
        computed again. `note` is data of the caller, which `Session.load` returns.

        Only this user may read the file, which has the session's tokens. Raises OSError if it cannot be written; an
        earlier file then stays."""
        self._check_open()
        saved_session.save(self._driver, self._sequence, saved_session.path_of(path), self._compute, note)

    def _compute(self) -> None:
        """Computes the tokens that the cache has lost, if any. Waits for the end of the step of the last append."""
        sequence, length = self._sequence, len(self)
        strategy = logits_collector(length - 1, 1, self._driver.engine.model.vocab_size)

        def begin(engine: Engine) -> None:
            if not sequence.num_pending:
                strategy.outcome.set_result(None)
                return
            sequence.strategy, sequence.error, sequence.finish_reason = strategy, None, None
            sequence.wanted_from = length - 1
            engine.scheduler.add(sequence)

        try:
            self._driver.post(begin, strategy.outcome.set_exception)
            strategy.outcome.result()
        except BaseException:
            self._restore_to(length)
            raise

    @classmethod
    def load(
        cls,
        driver: EngineDriver,
        path: str | Path,
        cache_salt: str | None = None,
        adapter: AdapterKey = (),
        read_media: MediaReader | None = None,
    ) -> tuple[Session, bytes]:
        """Returns the session in a file, and the note that was saved with it. Raises the errors of
        `LLMModel.load_session`."""
        path = saved_session.path_of(path)
        session = cls(driver, cache_salt, adapter, read_media)
        try:
            return session, saved_session.load(driver, session._sequence, path)
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Frees the memory. Closing twice is harmless."""
        self._is_closed = True
        self._driver.abort([self._sequence])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._driver.abort([self._sequence])

    # ------------------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("this session is closed; make a new one with LLMModel.session()")

    def _with_media(self, ids: Appended) -> tuple[Iterable[int] | Tensor, tuple[MediaSpan, ...]]:
        """Reads what is appended: token ids, not checked yet, and the media among them."""
        if isinstance(ids, Mapping) and self._read_media is not None:
            ids = self._read_media(ids, not len(self))
        if not isinstance(ids, Prompts):
            return ids, ()
        if len(ids.rows) != 1:
            raise ValueError(f"append takes one sequence of tokens; got {len(ids.rows)} of them")
        return ids.rows[0], ids.media[0] if ids.media else ()

    def _checked_ids(self, ids: Iterable[int] | Tensor) -> list[int]:
        if isinstance(ids, (str, bytes)):
            raise TypeError("append takes token ids, got a string; encode it with the model's tokenizer")
        if hasattr(ids, "tolist"):  # a tensor or array
            ids = ids.tolist()
        if not isinstance(ids, (Iterable, numbers.Integral)):
            raise TypeError(f"append takes token ids, a list of ints or an integer tensor [S]; got {ids!r:.100}")
        ids = (
            [ids]
            if isinstance(ids, numbers.Integral)
            else [token.tolist() if hasattr(token, "tolist") else token for token in ids]
        )
        vocab_size = self._driver.engine.model.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, numbers.Integral):
                raise TypeError(
                    f"append takes token ids, a list of ints or an integer tensor [S]; got {token!r:.100} among them"
                )
            if not 0 <= token < vocab_size:
                raise ValueError(f"append got the token id {token}; this model's ids are 0 to {vocab_size - 1}")
        if not ids:
            raise ValueError("append got no tokens; give at least one")
        length, most = len(self) + len(ids), self._sequence.max_length
        if length > most:
            raise ValueError(
                f"the session has {len(self)} tokens, and {len(ids)} more would exceed its maximum of {most}: "
                f"{self._driver.engine.explain_length_limit(length)}"
            )
        return [int(token) for token in ids]

    def _num_rows(self, logits: str | int, num_ids: int) -> int:
        named = {"last": 1, "all": num_ids}
        if isinstance(logits, str) and logits in named:
            return named[logits]
        if isinstance(logits, bool) or not isinstance(logits, numbers.Integral) or not 1 <= logits <= num_ids:
            raise ValueError(
                f'logits must be "last", "all", or an int from 1 to the {num_ids} tokens appended; got {logits!r}'
            )
        return int(logits)

    def _check_room(self, num_rows: int) -> None:
        """Raises MemoryError if the rows of logits would not fit into memory."""
        num_bytes = 4 * num_rows * self._driver.engine.model.vocab_size
        if num_bytes > MANY_BYTES and num_bytes > (available := available_memory_bytes()):
            raise MemoryError(
                f"{num_rows} rows of logits take {format_bytes(num_bytes)}, but only {format_bytes(available)} of "
                f"memory are free; append the tokens in pieces, ask for fewer rows, or use score, which keeps one "
                f"number for each token"
            )

    def _run(self, function: Callable[[Engine], None]) -> None:
        """Runs `function` on the engine's thread, and waits for it."""
        self._driver.call(function).result()

    def _cut(self, engine: Engine, num_tokens: int) -> None:
        """Drops tokens from the end of the parked sequence."""
        sequence = self._sequence
        del sequence.tokens[num_tokens:]
        sequence.media = tuple(span for span in sequence.media if span.end <= num_tokens)
        if not num_tokens:  # otherwise the remaining tokens keep their angles
            sequence.num_prompt_tokens = 0
        engine.cache.truncate(sequence, num_tokens)

    def _restore_to(self, num_tokens: int) -> None:
        """Restores a parked sequence of `num_tokens` tokens, at any point at which an append was interrupted."""
        self._run(lambda engine: self._restore(engine, num_tokens))

    def _restore(self, engine: Engine, num_tokens: int) -> None:
        """Calls `_restore_to` on the engine's thread."""
        sequence = self._sequence
        engine.scheduler.remove(sequence)
        sequence.error = sequence.finish_reason = sequence.strategy = None
        self._cut(engine, num_tokens)
        engine.scheduler.park(sequence)


def _extents(media: Iterable[MediaSpan]) -> Iterable[tuple[int, int]]:
    """Yields the first token of each medium, and the position after its last one."""
    start = 0
    for span in media:
        start = start if span.first else span.start
        if span.is_last:
            yield start, span.end


def append_each(appends: SequenceOf[tuple[Session, Appended]], logits: str | int = "last") -> list[Tensor]:
    """Runs `Session.append` for several sessions of one model at once, in common steps. Returns the rows of logits of
    each. After an error or Ctrl-C all of them are unchanged."""
    sessions = [session for session, _ in appends]
    lengths = [len(session) for session in sessions]
    begins, strategies = zip(*(session._plan(ids, logits) for session, ids in appends))

    def begin(engine: Engine) -> None:
        for each in begins:
            each(engine)

    def refuse(error: BaseException) -> None:
        for strategy in strategies:
            strategy.outcome.set_exception(error)

    try:
        sessions[0]._driver.post(begin, refuse)
        return [strategy.outcome.result() for strategy in strategies]
    except BaseException:
        for session, length in zip(sessions, lengths):
            session._restore_to(length)
        raise
