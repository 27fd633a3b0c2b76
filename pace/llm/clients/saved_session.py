"""Saves the sequence of a session in a file, and loads it: tokens and media, and what the cache holds of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np

from pace.llm.cache.copies import Extent, Piece, enter_room, prepare_room, read_piece, take_room, write_piece
from pace.llm.cache.groups import first_kept
from pace.llm.cache.identity import ModelIdentity
from pace.llm.cache.room import Room
from pace.llm.cache.saved_file import SavedFile, write_file
from pace.llm.clients.saved_media import describe, feature_bytes, read_media, whole_media
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.inputs import held_token
from pace.llm.sequence import AdapterKey, Sequence
from pace.media.media import MediaSpan

logger = logging.getLogger("pace")

TOKEN = np.dtype("<i4")
ATTEMPTS = 3
"""Times that a sequence is computed again for saving, if others take its place in the cache meanwhile."""

T = TypeVar("T")


class Saved(NamedTuple):
    """The contents of a file that are not in the cache."""

    tokens: list[int]
    num_prompt_tokens: int
    """Length that decides angles (`Sequence.rope_length`)."""
    extent: Extent
    """What the file has of the cache."""
    note: bytes
    """Data of the program that saved it."""
    adapter: AdapterKey = ()
    """The adapters that it was computed with."""
    media: tuple[MediaSpan, ...] = ()


class _Lost(Exception):
    """Others have taken the place of the sequence in the cache."""


def path_of(path: Any) -> Path:
    """Reads the argument `path`. Raises TypeError."""
    if not isinstance(path, (str, os.PathLike)) or isinstance(os.fspath(path), bytes):
        raise TypeError(f"a saved session has a path, a str or a Path; got {path!r:.100}")
    return Path(path).expanduser()


# -- saving ------------------------------------------------------------------------------------------------------------


def save(driver: EngineDriver, sequence: Sequence, path: Path, compute: Callable[[], None], note: bytes = b"") -> None:
    """Writes a parked sequence to a file, and changes nothing else. `compute` computes what the cache has lost of the
    sequence. Raises OSError if the file cannot be written, and ValueError for a model without a checkpoint."""
    about = _identity(driver).described()
    for _ in range(ATTEMPTS):
        compute()
        try:
            return _save_once(driver, sequence, path, about, note)
        except _Lost:
            continue
    raise MemoryError(
        f"{path} was not written: other sequences took the cache's memory while the session was saved; save it again, "
        "or load the model with more kv_cache_bytes"
    )


def _save_once(driver: EngineDriver, sequence: Sequence, path: Path, about: dict[str, str], note: bytes) -> None:
    tokens = np.array(sequence.tokens, TOKEN).tobytes()
    extent, spec = _call(driver, lambda engine: (Extent.of(engine.cache, sequence), engine.cache.spec))
    if extent.num_tokens < len(sequence.tokens):
        raise _Lost
    pieces = list(extent.pieces(spec))
    features = [feature_bytes(media) for media in whole_media(sequence.media)]
    head = {
        "model": about,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_computed": extent.num_tokens,
        "starts": extent.starts,
        "has_mark": extent.has_mark,
    }
    if sequence.adapter:
        head["adapter"] = sequence.adapter
    if sequence.media:
        head["media"], head["mmproj"] = describe(sequence.media), _identity(driver).mmproj

    def contents() -> Iterator[bytes | memoryview]:
        yield tokens
        yield note
        yield from features
        for piece in pieces:
            data = _call(driver, partial(_read, sequence=sequence, piece=piece, num_tokens=extent.num_tokens))
            if data is None:
                raise _Lost
            yield data.data

    before = [len(tokens), len(note), *map(len, features)]
    write_file(path, head, [*before, *(piece.num_bytes for piece in pieces)], contents())


def _read(engine: Engine, sequence: Sequence, piece: Piece, num_tokens: int) -> np.ndarray | None:
    return read_piece(engine.cache, sequence, piece) if sequence.num_computed == num_tokens else None


def file_bytes(engine: Engine, num_tokens: int) -> int:
    """Bytes of a file with this many tokens, without its head."""
    spec = engine.cache.spec
    extent = Extent(num_tokens, tuple(first_kept(num_tokens, group.window) for group in spec.groups))
    return num_tokens * TOKEN.itemsize + sum(piece.num_bytes for piece in extent.pieces(spec))


# -- loading -----------------------------------------------------------------------------------------------------------


def inspect(driver: EngineDriver, path: Path) -> Saved:
    """Returns what a file has besides keys, values and states, which are not read. Raises the errors of `load`."""
    with SavedFile(path) as file:
        return _checked(file, driver)[0]


def load(driver: EngineDriver, sequence: Sequence, path: Path) -> bytes:
    """Fills a parked sequence without tokens from a file; returns the note. Raises FileNotFoundError, and ValueError
    that names the file and the reason. The sequence must then be dropped, and nothing else has changed.

    If running sequences need all memory of the cache, the sequence only gets its tokens. The next append computes them,
    with the same result."""
    with SavedFile(path) as file:
        saved, pieces = _checked(file, driver)
        if saved.adapter != sequence.adapter:
            raise file.refused(
                "it was computed with other adapters, or with other weights of them; open it with those, or compute it "
                "again"
            )
        num_tokens = saved.extent.num_tokens
        has_room = _call(driver, lambda engine: _begin(engine, sequence, saved))
        first = 2 + len(whole_media(saved.media))
        cache = driver.engine.cache
        of_cache = file.pieces(first, lambda number: prepare_room(cache, sequence, pieces[number - first]))
        for piece, data in zip(pieces, of_cache, strict=True):  # checks all, also without room
            if has_room:
                write = partial(_write, sequence=sequence, piece=piece, data=data, num_tokens=num_tokens)
                has_room = _call(driver, write)
        if not has_room or not _call(driver, lambda engine: _end(engine, sequence, num_tokens)):
            logger.warning("%s: the cache has no room for it now, so its tokens are computed again", path)
    return saved.note


def _checked(file: SavedFile, driver: EngineDriver) -> tuple[Saved, list[Piece]]:
    """Does `_check`; errors have the file's name."""
    try:
        return _check(file, driver)
    except ValueError as error:
        named = str(error).startswith(str(file.path))
        raise error if named else file.refused(str(error)) from None


def _check(file: SavedFile, driver: EngineDriver) -> tuple[Saved, list[Piece]]:
    """Returns what a file has, and the pieces of the cache. Raises ValueError without the file's name."""
    engine, head = driver.engine, file.head
    about = head.get("model")
    if not isinstance(about, dict):
        raise ValueError("its head does not describe a model")
    _identity(driver).check(about, file.version)
    num_prompt_tokens, num_computed, starts = (
        head.get(name) for name in ("num_prompt_tokens", "num_computed", "starts")
    )
    tokens = np.frombuffer(file.piece(0), TOKEN).tolist() if len(file.sizes) > 1 and not file.sizes[0] % 4 else None
    # A session that was cut keeps the angles of its longer prompt.
    longest = engine.model.max_position_embeddings
    if tokens is None or not (_is_count(num_prompt_tokens, longest) and _is_count(num_computed, len(tokens))):
        raise ValueError("its head contradicts itself")
    if len(tokens) > engine.max_length:
        raise ValueError(
            f"it has {len(tokens)} tokens, more than this model takes, {engine.max_length}: "
            f"{engine.explain_length_limit(len(tokens))}"
        )
    if tokens and not 0 <= min(tokens) <= max(tokens) < engine.model.vocab_size:
        raise ValueError("it has tokens that this model does not have")
    entries = head.get("media", [])
    num_first = 2 + (len(entries) if isinstance(entries, list) else 0)
    spec = engine.cache.spec
    extent = Extent(num_computed, tuple(starts) if isinstance(starts, list) else (), head.get("has_mark") is True)
    pieces = list(extent.pieces(spec)) if extent.is_valid(spec) else None
    if pieces is None or file.sizes[num_first:] != [piece.num_bytes for piece in pieces]:
        raise ValueError("its keys and values have another layout than this model's")
    adapter = _adapter_of(head.get("adapter", []))
    if entries and head.get("mmproj") != _identity(driver).mmproj:
        raise ValueError("its images were encoded with another mmproj file; give that one, or compute it again")
    vocab_size = engine.model.vocab_size
    towers = {tower.kind: tower for tower in engine.model.towers}
    placeholders = {kind: held_token(tower.placeholder, vocab_size) for kind, tower in towers.items()}
    media = read_media(entries, [file.piece(number) for number in range(2, num_first)], tokens, placeholders)
    for medium in whole_media(media):
        if towers[medium.kind].angle_offsets(medium)[0].shape[1] != medium.num_tokens:
            raise ValueError("its media have other sizes than their tokens")
    return Saved(tokens, num_prompt_tokens, extent, bytes(file.piece(1)), adapter, media), pieces


def _is_count(value: Any, maximum: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= maximum


def _adapter_of(value: Any) -> AdapterKey:
    """Reads the adapters of a head. Raises ValueError without the file's name."""
    is_key = isinstance(value, list) and all(
        isinstance(each, list) and [type(part) for part in each] in ([str, float], [str, int]) for each in value
    )
    if not is_key:
        raise ValueError("its head names adapters in another form")
    return tuple((digest, float(weight)) for digest, weight in value)


def _begin(engine: Engine, sequence: Sequence, saved: Saved) -> bool:
    """Gives the sequence its tokens, and room in the cache. Returns False without room."""
    cache, scheduler = engine.cache, engine.scheduler
    sequence.tokens, sequence.num_prompt_tokens, sequence.media = saved.tokens, saved.num_prompt_tokens, saved.media

    def take() -> bool:
        if not take_room(cache, sequence, saved.extent):
            return False
        if sum(map(cache.room_to_grow, scheduler.running), Room()).fits_in(cache.free_room):
            return True
        cache.free(sequence)
        return False

    return scheduler.make_idle_room(sequence, take)


def _has_room(sequence: Sequence) -> bool:
    """False if others have taken the room of a sequence that is loaded."""
    return bool(sequence.block_table)


def _write(engine: Engine, sequence: Sequence, piece: Piece, data: memoryview, num_tokens: int) -> bool:
    if not _has_room(sequence):
        return False
    write_piece(engine.cache, sequence, piece, data, num_tokens)
    return True


def _end(engine: Engine, sequence: Sequence, num_tokens: int) -> bool:
    if num_tokens and not _has_room(sequence):
        return False
    enter_room(engine.cache, sequence, num_tokens)
    return True


def _identity(driver: EngineDriver) -> ModelIdentity:
    identity = driver.engine.identity
    if identity is None:
        raise ValueError("only models of a checkpoint can save and load sessions")
    return identity


def _call(driver: EngineDriver, function: Callable[[Engine], T]) -> T:
    """Runs `function` on the engine's thread, and waits for its result."""
    return driver.call(function).result()
