"""The adapters of a loaded model by name: loading, unloading, and holding them while calls use them."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pace.llm.adapters.read import read_adapter
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.engine.driver import EngineDriver
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.sequence import AdapterKey
from pace.naming import shown

MAX_NAME = 128
"""Maximum number of characters of a name."""

Choice = str | Sequence[tuple[str, float]] | None
"""An adapter by name; several with their weights; None for the base model."""


class NameTaken(ValueError):
    """Error for a new adapter with the name of another."""


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests may name."""

    name: str
    path: Path
    rank: int
    """The largest rank of a module."""
    num_modules: int
    digest: str
    """Digest of its contents."""


class _Entry:
    """An adapter and the calls that use it."""

    def __init__(self, loaded: LoadedAdapter) -> None:
        self.loaded = loaded
        self.num_calls = 0
        self.is_unloaded = False


class Adapters:
    """The adapters of one model. Threads may share it.

    An adapter that is unloaded stays until the last call that uses it ends, and its name is free at once."""

    def __init__(self, driver: EngineDriver, base: Checkpoint | None) -> None:
        """`base` is the checkpoint of the model; None for a model that was not read from one."""
        self._driver = driver
        self._base = base
        self._entries: dict[str, _Entry] = {}
        self._reading: set[str] = set()
        """Names of adapters that are being loaded."""
        self._lock = threading.RLock()  # a finaliser may end a call while its own thread holds it

    @property
    def loaded(self) -> list[LoadedAdapter]:
        """The adapters, in the order in which they were loaded."""
        with self._lock:
            return [entry.loaded for entry in self._entries.values()]

    def load(self, path: str | Path, name: str | None = None) -> LoadedAdapter:
        """Loads an adapter; see `LLMModel.load_adapter`. Raises NameTaken for a name that another one has."""
        if self._base is None:
            raise ValueError("this model was not read from a checkpoint, which adapters are made for")
        name = _checked_name(_name_of(Path(path)) if name is None else name)
        with self._lock:
            if name in self._entries or name in self._reading:
                raise NameTaken(f"an adapter with the name {name!r} is loaded; unload it first, or use another name")
            self._reading.add(name)
        try:
            weights = read_adapter(path, name, self._base)
            self._driver.engine.model.adapters.check(weights)
            digest = self._into_slot(weights)
            loaded = LoadedAdapter(name, Path(path), weights.rank, len(weights.modules), digest)
            with self._lock:
                self._entries[name] = _Entry(loaded)
            return loaded
        finally:
            with self._lock:
                self._reading.discard(name)

    def _into_slot(self, weights: AdapterWeights) -> str:
        """Loads an adapter into a slot and returns its digest. Ctrl-C leaves no slot taken."""
        digest = weights.digest  # hashed here, so that no step waits for it
        loading = self._driver.call(lambda engine: engine.model.adapters.load(weights))
        try:
            return loading.result()
        except BaseException:
            if not loading.done() or loading.exception() is None:
                self._driver.tidy(lambda engine: engine.unload_adapter(digest))
            raise

    def unload(self, name: str) -> None:
        """Unloads an adapter. Calls that use it go on. Raises ValueError for an unknown name."""
        with self._lock:
            entry = self._entry(name)
            del self._entries[name]
            entry.is_unloaded = True
            if not entry.num_calls:
                self._drop(entry)

    def check(self, choice: Choice) -> None:
        """Raises TypeError or ValueError unless these adapters are loaded."""
        with self._lock:
            _ = [self._entry(name) for name, _ in _read_choice(choice)]

    @contextmanager
    def using(self, choice: Choice) -> Iterator[AdapterKey]:
        """Yields the key of adapters for `Sequence.adapter`. They stay loaded while the block runs, and then as long as
        a sequence in the engine names them. Raises the errors of `check`."""
        weights = _read_choice(choice)
        with self._lock:
            entries = [self._entry(name) for name, _ in weights]
            for entry in entries:
                entry.num_calls += 1
        try:
            sums: dict[str, float] = {}
            for entry, (_, weight) in zip(entries, weights):
                sums[entry.loaded.digest] = sums.get(entry.loaded.digest, 0.0) + weight
            yield tuple(sorted((digest, weight) for digest, weight in sums.items() if weight))
        finally:
            with self._lock:
                for entry in entries:
                    entry.num_calls -= 1
                    if entry.is_unloaded and not entry.num_calls:
                        self._drop(entry)

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            known = f"loaded are {', '.join(self._entries)}" if self._entries else "none is loaded"
            raise ValueError(f"there is no adapter {shown(name)}; {known} (load_adapter loads one)")
        return self._entries[name]

    def _drop(self, entry: _Entry) -> None:
        """Unloads an adapter from the engine, after all that was posted before."""
        digest = entry.loaded.digest
        self._driver.tidy(lambda engine: engine.unload_adapter(digest))


def _name_of(path: Path) -> str:
    """The last part of a path. Of a file, without what follows the last dot."""
    path = path.expanduser().resolve()
    return path.stem if path.is_file() else path.name


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"an adapter's name must be a text; got {type(name).__name__}")
    if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
        raise ValueError(f"an adapter's name must be 1 to {MAX_NAME} printable characters; got {shown(name)}")
    return name


def _read_choice(choice: Choice) -> list[tuple[str, float]]:
    """Returns names and weights. Raises TypeError or ValueError for anything else."""
    if choice is None:
        return []
    if isinstance(choice, str):
        return [(choice, 1.0)]
    if not isinstance(choice, Sequence):
        raise TypeError(f'adapter must be a name, or a list such as [("name", 1.0)]; got {shown(choice)}')
    found = []
    for item in choice:
        is_pair = isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2
        if not is_pair or not isinstance(item[0], str):
            raise TypeError(f'adapter must be a list of names and weights, such as [("name", 1.0)]; got {shown(item)}')
        weight = item[1]
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ValueError(f"the weight of the adapter {shown(item[0])} must be a finite number; got {shown(weight)}")
        found.append((item[0], float(weight)))
    if len({name for name, _ in found}) < len(found):
        raise ValueError(f"adapter names an adapter twice: {shown(choice)}")
    return found
