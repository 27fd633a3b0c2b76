"""`ServedAdapters`: the adapters of a served model by name."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pace.llm.clients.adapters import Adapters, Choice, LoadedAdapter, NameTaken
from pace.llm.sequence import AdapterKey
from pace.server.errors import ApiError, invalid
from pace.server.options import ServeOptions

logger = logging.getLogger("pace")

OFF = "adapters are not loaded over HTTP here (start the server with --lora-dir DIR, and send a path inside of DIR)"


class ServedAdapters:
    """The adapters that requests may name. A model that is loaded again gets those it had.

    `attach`, `load` and `unload` may be called on any thread, everything else on the event loop."""

    def __init__(self, options: ServeOptions) -> None:
        self._taken = frozenset(options.model_names)
        self._folder = options.lora_dir and Path(options.lora_dir).expanduser().resolve()
        self._paths = {name: Path(path).expanduser() for name, path in options.lora}
        """Adapters that the model has whenever it is loaded."""
        self._numbers: dict[str, int] = {}
        """Number of each adapter in llama.cpp's requests, in the order of loading."""
        self._next_number = itertools.count()
        self._loaded: dict[str, LoadedAdapter] = {}
        self._of_model: Adapters | None = None
        self._lock = threading.Lock()
        """Held while an adapter is kept or dropped: a client may unload one while the model is loaded again."""

    def attach(self, adapters: Adapters) -> None:
        """Loads the adapters into a model that was loaded. Raises the errors of `Adapters.load`.

        An adapter that the model had before may be gone. It is left out with a warning, and requests that name it get
        404."""
        self._of_model = adapters
        for name, path in list(self._paths.items()):
            try:
                loaded = adapters.load(path, name)
            except (NotImplementedError, OSError, ValueError) as error:
                if name not in self._numbers:
                    raise
                logger.warning("the adapter %r could not be loaded again: %s", name, error)
                self._loaded.pop(name, None)
                continue
            with self._lock:
                if name in self._paths:
                    self._add(name, loaded)
                else:  # a client unloaded it meanwhile
                    self._drop(name)

    def detach(self) -> None:
        """Forgets the model, which is unloaded."""
        self._of_model = None

    # -- for requests --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._paths)

    def choice(self, name: str, scales: Iterable[tuple[int, float]] | None) -> Choice:
        """Returns the adapters of a request that names the model or an adapter. `scales` has llama.cpp's numbers of
        adapters with their weights. Raises ApiError."""
        if scales is None:
            return name if name in self._paths else None
        if name in self._paths:
            raise invalid("lora", f"cannot be combined with the model {name!r}, which is an adapter")
        by_number = {number: known for known, number in self._numbers.items()}
        chosen = []
        for number, scale in scales:
            if number not in by_number:
                listed = f"there are {', '.join(map(str, sorted(by_number)))}" if by_number else "there are none"
                raise invalid("lora", f"names the adapter {number}, which is not loaded; {listed} (GET /lora-adapters)")
            chosen.append((by_number[number], scale))
        return chosen

    @contextmanager
    def using(self, choice: Choice) -> Iterator[AdapterKey]:
        """Yields the key of adapters, which stay loaded while the block runs. Raises ApiError 404 for one that was
        unloaded since the request was read."""
        if not choice or self._of_model is None:
            yield ()
            return
        with contextlib.ExitStack() as stack:
            try:
                key = stack.enter_context(self._of_model.using(choice))
            except ValueError as error:
                raise ApiError(404, str(error), param="model", code="model_not_found") from None
            yield key

    # -- /lora-adapters ------------------------------------------------------------------------------------------------

    def listed(self) -> list[dict[str, Any]]:
        """Returns the adapters in llama.cpp's form. `scale` is the weight for requests that name no adapter."""
        return [self._described(loaded) for loaded in list(self._loaded.values())]

    def load(self, name: str, path: str) -> dict[str, Any]:
        """Loads the adapter at a path inside of the operator's folder. Runs in a worker. Raises ApiError: 409 for a
        name that is taken, 400 for a path outside, and for an adapter that cannot be loaded."""
        if self._folder is None:
            raise ApiError(400, OFF, param="path", code="adapters_not_loaded")
        if self._of_model is None:
            raise ApiError(503, "the model is not loaded", headers={"retry-after": "5"})
        found = self._inside(path)
        try:
            if name in self._taken:
                raise NameTaken(f"the model has the name {name!r}")
            loaded = self._of_model.load(found, name)
        except NameTaken as error:
            raise ApiError(409, str(error), param="name", code="name_taken") from None
        except FileNotFoundError:
            raise ApiError(404, f"there is no adapter at {path!r}", param="path", code="adapter_not_found") from None
        except (NotImplementedError, OSError, TypeError, ValueError) as error:
            message = str(error).replace(f"{self._folder}/", "")
            raise ApiError(400, message, param="name" if "name" in message[:20] else "path") from None
        with self._lock:
            self._paths[name] = found
            self._add(name, loaded)
        return self._described(loaded)

    def unload(self, name: str) -> None:
        """Unloads an adapter; running requests keep it to their end. Raises ApiError 404."""
        if name not in self._paths:
            raise ApiError(404, f"there is no adapter {name[:128]!r}", param="name", code="adapter_not_found")
        with self._lock:
            del self._paths[name]
            self._numbers.pop(name, None)
            self._loaded.pop(name, None)
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Unloads an adapter from the model, if both are loaded."""
        if self._of_model is not None and name in [loaded.name for loaded in self._of_model.loaded]:
            self._of_model.unload(name)

    def _add(self, name: str, loaded: LoadedAdapter) -> None:
        """Keeps an adapter that was loaded. It gets a number that none had before, unless it has one."""
        if name not in self._numbers:
            self._numbers[name] = next(self._next_number)
        self._loaded[name] = loaded

    def _inside(self, path: str) -> Path:
        found = (self._folder / path).resolve() if "\0" not in path else self._folder
        if found == self._folder or not found.is_relative_to(self._folder):
            raise invalid("path", "must be a path inside of the server's folder of adapters")
        return found

    def _described(self, loaded: LoadedAdapter) -> dict[str, Any]:
        return {
            "id": self._numbers[loaded.name],
            "name": loaded.name,
            "path": loaded.path.name,
            "scale": 0.0,
            "rank": loaded.rank,
        }
