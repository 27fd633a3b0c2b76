"""What the bits of a cache depend on, besides tokens: saved keys and values are only used where these are the same."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from pace.checkpoints.digest import VERSION


class Setting(NamedTuple):
    """A choice that decides bits of the cache, or their layout."""

    value: str
    meaning: str
    """What it is, for messages: "the dtype of the weights"."""
    advice: str
    """How to get another value, with `{}` for it: "load the model with dtype={!r}"."""


class ModelIdentity:
    """The settings of a loaded model, and the digest of its checkpoint."""

    def __init__(
        self, settings: dict[str, Setting], digest: Callable[[int], str], mmproj: Callable[[], str] = lambda: ""
    ) -> None:
        """`digest(version)` returns a digest of the checkpoint's contents, and `mmproj` that of the file of its towers
        if they are in another one. They read all files, so each is called once, when it is first needed."""
        self.settings = settings
        self._compute, self._compute_mmproj = digest, mmproj
        self._digests: dict[int, str] = {}
        self._mmproj: str | None = None
        self._lock = threading.Lock()

    def digest(self, version: int) -> str:
        """Digest of the checkpoint's contents: weights, config and tokenizer. Raises OSError or ValueError if its files
        have changed since they were loaded."""
        with self._lock:
            if version not in self._digests:
                self._digests[version] = self._compute(version)
            return self._digests[version]

    @property
    def mmproj(self) -> str:
        """Digest of the file of its towers; empty if they are in the checkpoint. Raises OSError."""
        with self._lock:
            if self._mmproj is None:
                self._mmproj = self._compute_mmproj()
            return self._mmproj

    def described(self) -> dict[str, str]:
        """The settings and the digest, as they are saved."""
        return {name: setting.value for name, setting in self.settings.items()} | {"checkpoint": self.digest(VERSION)}

    def check(self, saved: dict[str, str], version: int = VERSION) -> None:
        """Raises ValueError, which names the first difference, unless `saved` describes this model. `version` is that
        of its digest."""
        for name, setting in self.settings.items():
            found = saved.get(name)
            if found != setting.value:
                raise ValueError(
                    f"{setting.meaning} was {found} when it was saved, and is {setting.value} here; "
                    f"{setting.advice.format(found)}, or compute it again"
                )
        if saved.get("checkpoint") != self.digest(version):
            raise ValueError(
                "it was saved with another checkpoint: weights, config or tokenizer differ; load the model that it was "
                "saved with, or compute it again"
            )
