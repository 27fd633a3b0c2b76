"""The folder of kept prefixes of one model, and their way into the prefix cache."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pace.batch import BLOCK_SIZE
from pace.llm.cache.prefix_cache import NoPrefixCache
from pace.llm.cache.saved_file import remove_abandoned
from pace.llm.clients.saved_session import file_bytes, inspect
from pace.llm.clients.session import Session
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.inputs import Prompts
from pace.llm.processors.prompts import Prompt
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import NeverStops
from pace.media.media import MediaSpan
from pace.memory import format_bytes
from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.prefixes.names import FILE, file_of, hashed

logger = logging.getLogger("pace")

T = TypeVar("T")
OFF = "prefixes are not kept here; start the server with --prefix-dir DIR"


@dataclass(frozen=True)
class Prefix:
    """A kept prefix."""

    name: str
    owner: str
    """Hash of its key's salt."""
    salt: str
    """Hash of the salt that requests need to use it."""
    tokens: list[int]
    media: list[tuple[int, bytes]]
    """First token and digest of each run of an image or a clip."""
    path: Path

    def shown(self) -> dict[str, Any]:
        status = self.path.stat()
        return {
            "object": "prefix",
            "name": self.name,
            "tokens": len(self.tokens),
            "bytes": status.st_size,
            "created": int(status.st_mtime),
        }


class Prefixes:
    """The prefixes of a folder. Its own thread reads and writes files; the other methods are for the event loop."""

    def __init__(self, folder: Path, driver: EngineDriver, limits: Limits) -> None:
        """Reads what each file is about. Files of other models, and damaged ones, stay and are reported in the log.
        Raises ValueError if the folder cannot be used."""
        if isinstance(driver.engine.cache.prefix, NoPrefixCache):
            raise ValueError(f"prefix_dir={folder} needs the prefix cache, which this model is loaded without")
        self._folder, self._limits = folder, limits
        self._driver: EngineDriver | None = driver
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pace-prefixes")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_abandoned(folder, "*.prefix")
            self._known = {prefix.path: prefix for prefix in self._found()}
        except OSError as error:
            raise ValueError(f"prefix_dir={folder} cannot be used: {error.strerror}") from None

    def _found(self) -> Iterator[Prefix]:
        for path in sorted(self._folder.iterdir()):
            if not (named := FILE.fullmatch(path.name)):
                continue
            try:
                saved = inspect(self._driver, path)
                about = json.loads(saved.note)
                if (about["name"], about["owner"]) != (named["name"], named["owner"]):
                    raise ValueError(f"{path} has another name than the prefix in it; rename it back")
                yield Prefix(about["name"], about["owner"], about["salt"], saved.tokens, _keys(saved.media), path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("a kept prefix is not used: %s", error)

    def attach(self, driver: EngineDriver | None) -> None:
        """Goes on with the model loaded anew, or without it: `save` and `restored` need it."""
        self._driver = driver

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- requests ------------------------------------------------------------------------------------------------------

    def listed(self, key_salt: str | None) -> list[dict[str, Any]]:
        """The prefixes of a client."""
        own = hashed(key_salt)
        kept = [prefix for path, prefix in list(self._known.items()) if prefix.owner == own and path.exists()]
        return [prefix.shown() for prefix in kept]

    async def save(self, name: str, prompt: Prompt, key_salt: str | None, salt: str | None) -> dict[str, Any]:
        """Computes a prompt whose media are decoded, and keeps it; replaces an earlier prefix of the name. Raises
        ApiError."""
        media, path = prompt.media, file_of(self._folder, name, hashed(key_salt))
        prefix = Prefix(name, hashed(key_salt), hashed(salt), prompt.tokens, _keys(media), path)
        await self._run(lambda: self._save(prefix, media, salt))
        return prefix.shown()

    async def delete(self, name: str, key_salt: str | None) -> None:
        """Raises ApiError 404 if there is no such prefix."""
        path = file_of(self._folder, name, hashed(key_salt))
        if path not in self._known:
            raise ApiError(
                404, f"there is no prefix {name[:100]!r}; GET /prefixes lists yours", code="prefix_not_found"
            )
        await self._run(lambda: self._delete(path))

    @asynccontextmanager
    async def restored(self, prompts: list[Prompt], salt: str | None) -> AsyncIterator[None]:
        """Loads the longest kept prefix of each prompt, unless the prefix cache has it. Within the block, the cache
        holds each as long as it has room, also more of it than the prefix cache keeps. Media are decoded."""
        given = [(prompt.tokens, prompt.media) for prompt in prompts]
        found = {prefix.path: (prefix, media) for tokens, media in given if (prefix := self._find(tokens, media, salt))}
        with ExitStack() as held:
            for prefix, media in found.values():
                load = partial(self._restore, prefix, media, salt)
                held.enter_context(await self._run(load))
            yield

    def _find(self, tokens: list[int], media: tuple[MediaSpan, ...], salt: str | None) -> Prefix | None:
        own, keys = hashed(salt), _keys(media)
        found = [
            prefix
            for prefix in list(self._known.values())
            if prefix.salt == own
            and len(prefix.tokens) < len(tokens)
            and tokens[: len(prefix.tokens)] == prefix.tokens
            and keys[: len(prefix.media)] == prefix.media
        ]
        return max(found, key=lambda prefix: len(prefix.tokens), default=None)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _save(self, prefix: Prefix, media: tuple[MediaSpan, ...], salt: str | None) -> None:
        self._check_room(prefix, sum(span.media.features.nbytes for span in media if not span.first))
        note = json.dumps({"name": prefix.name, "owner": prefix.owner, "salt": prefix.salt}).encode()
        try:
            with Session(self._driver, cache_salt=salt) as session:
                session.append(Prompts([prefix.tokens], None, [media]))
                session.save(prefix.path, note)
        except OSError as error:
            logger.warning("the prefix %s was not kept: %s", prefix.name, error)
            raise ApiError(
                500, f"the prefix was not written ({error.strerror}); the server's log has details"
            ) from None
        self._known[prefix.path] = prefix

    def _check_room(self, prefix: Prefix, media_bytes: int) -> None:
        others = [path for path in self._folder.iterdir() if FILE.fullmatch(path.name) and path != prefix.path]
        if len(others) >= self._limits.prefixes:
            raise ApiError(
                400,
                f"{len(others)} prefixes are kept, the maximum; delete one (DELETE /prefixes/NAME)",
                code="too_many_prefixes",
            )
        used, most = sum(path.stat().st_size for path in others), self._limits.prefix_bytes
        needed = media_bytes + self._driver.call(lambda engine: file_bytes(engine, len(prefix.tokens))).result()
        if used + needed > most:
            raise ApiError(
                400,
                f"the prefix takes {format_bytes(needed)}, and {format_bytes(max(0, most - used))} of "
                f"{format_bytes(most)} are left; delete another (DELETE /prefixes/NAME), or keep a shorter one",
                code="too_many_prefixes",
            )

    def _delete(self, path: Path) -> None:
        self._known.pop(path, None)
        path.unlink(missing_ok=True)

    def _restore(self, prefix: Prefix, media: tuple[MediaSpan, ...], salt: str | None) -> AbstractContextManager:
        """Loads a prefix. One that cannot be read is not used any more; requests are answered without it."""
        try:
            if not self._driver.call(lambda engine: _is_cached(engine, prefix, media, salt)).result():
                return Session.load(self._driver, prefix.path, salt)[0]
        except (OSError, ValueError) as error:
            self._known.pop(prefix.path, None)
            logger.warning("a kept prefix is not used: %s", error)
        return nullcontext()


def _is_cached(engine: Engine, prefix: Prefix, media: tuple[MediaSpan, ...], salt: str | None) -> bool:
    """True if a request that begins with a prefix would compute none of it. `media` are those of the request."""
    tokens = prefix.tokens
    probe = Sequence([*tokens, 0], strategy=None, stopping=NeverStops(), max_length=len(tokens) + 1)
    probe.cache_salt, probe.media = salt, media
    engine.cache.reuse(probe)
    num_found = probe.num_computed
    engine.cache.free(probe)
    return num_found >= len(tokens) // BLOCK_SIZE * BLOCK_SIZE


def _keys(media: Iterable[MediaSpan]) -> list[tuple[int, bytes]]:
    return [(span.start, span.media.digest) for span in media]


def whole_blocks(prompt: Prompt) -> Prompt:
    """What later prompts share: whole blocks, without the last token, which a longer text may change. They end before
    an image or a clip that would be cut."""
    num_tokens = max(0, len(prompt.tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
    while len((found := prompt.beginning(num_tokens)).tokens) % BLOCK_SIZE:
        num_tokens = len(found.tokens) // BLOCK_SIZE * BLOCK_SIZE
    return found
