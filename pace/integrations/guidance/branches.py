"""Branches of programs that share a model. The tokens, keys and values of each branch are kept in a session.

guidance passes all tokens of a branch whenever it needs logits. `Branches` finds the session with the longest common
prefix. Several threads may call at once; their sessions then share the engine's steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pace.llm.clients.session import Session

NEAR = 8
"""A branch that lacks at most this many tokens is used without searching for a closer one."""


class Advance(NamedTuple):
    """Result of advancing a branch to given tokens."""

    rows: Tensor
    """fp32 `[rows, V]`: logits after each of the last tokens; the caller may modify them."""
    num_cached: int
    """Number of tokens that were not computed again."""


class Branch:
    """A session, its tokens, and the logits after the last of them."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.tokens: list[int] = []
        self.row: Tensor | None = None
        """`[1, V]`: logits after the last token; None if unknown."""
        self.is_busy = True
        self.used = 0
        """Counter value at the last use; larger is more recent."""

    def begins(self, ids: list[int]) -> bool:
        """True if the tokens of the branch are a prefix of `ids`."""
        length = len(self.tokens)
        return length <= len(ids) and self.tokens[-1:] == ids[length - 1 : length] and self.tokens == ids[:length]

    def num_shared(self, ids: list[int]) -> int:
        """Length of the common prefix of the branch and `ids`."""
        low, high = 0, min(len(ids), len(self.tokens))
        while low < high:  # binary search, because slices are compared in C
            middle = (low + high + 1) // 2
            if ids[low:middle] == self.tokens[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def fork_of(self, other: Branch, ids: list[int]) -> None:
        """Turns this branch into a fork of `other` with the common prefix of `other` and `ids`."""
        self.close()
        self.session, self.tokens, self.row = other.session.fork(), list(other.tokens), None
        self.cut(self.num_shared(ids))

    def close(self) -> None:
        """Frees the session."""
        if self.session is not None:
            self.session.close()

    def cut(self, num_tokens: int) -> None:
        """Drops all tokens after the first `num_tokens`."""
        if num_tokens < len(self.tokens):
            self.row = None
            self.session.truncate(num_tokens)
            del self.tokens[num_tokens:]

    def advance(self, ids: list[int], max_rows: int) -> Advance:
        """Sets the tokens to `ids` (at least one), and returns the logits after the new ones, at most the last
        `max_rows` rows. If tokens are only appended and there is room, they are preceded by the logits after the
        last old token."""
        num_cached = self.num_shared(ids)
        if num_cached == len(ids) == len(self.tokens) and self.row is not None:
            return Advance(self.row.clone(), num_cached)
        self.cut(min(num_cached, len(ids) - 1))
        num_cached, before = len(self.tokens), self.row
        self.row = None
        new = ids[num_cached:]
        rows = self.session.append(new, min(len(new), max_rows))
        self.tokens, self.row = list(ids), rows[-1:].clone()  # a copy: drawing edits the returned row
        if before is not None and len(new) < max_rows:
            rows = torch.cat([before, rows])
        return Advance(rows, num_cached)


class Branches:
    """At most `max_branches` branches. A new one replaces the least recently used. Thread-safe."""

    def __init__(self, new_session: Callable[[], Session], max_branches: int) -> None:
        self._new_session = new_session
        self._max_branches = max_branches
        self._all: list[Branch] = []
        self._uses = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def advance(self, ids: list[int], max_rows: int) -> Advance:
        """Advances the branch that shares the longest prefix with `ids`, like `Branch.advance`. A branch that would
        lose tokens is forked instead, so that it can still be continued. Blocks while all branches are busy. Raises
        what `Session.append` raises."""
        branch, source = self._claim(ids)
        try:
            if source is not None:
                branch.fork_of(source, ids)
            elif branch.session is None:
                branch.session = self._new_session()
            self._release(source)
            source = None
            return branch.advance(ids, max_rows)
        except BaseException:
            self._drop(branch)
            raise
        finally:
            self._release(source, branch)

    def close(self) -> None:
        """Frees the sessions; running computations fail. May be called twice."""
        with self._changed:
            self._is_closed = True
            for branch in self._all:
                branch.close()
            self._all.clear()
            self._changed.notify_all()

    def _claim(self, ids: list[int]) -> tuple[Branch, Branch | None]:
        """Marks a branch to be advanced to `ids` as busy and returns it. The second result, also busy, is the branch to
        fork it from first; None if no fork is needed."""
        with self._changed:
            while True:
                if self._is_closed:
                    raise ValueError("this model is closed; open it again with Pace(...)")
                found = self._find(ids)
                if found is not None:
                    break
                self._changed.wait()
            for one in found:
                if one is not None:
                    self._touch(one)
            return found

    def _find(self, ids: list[int]) -> tuple[Branch, Branch | None] | None:
        idle = sorted((one for one in self._all if not one.is_busy), key=lambda one: -one.used)
        grown = None
        for branch in idle:
            if branch.begins(ids) and (grown is None or len(branch.tokens) > len(grown.tokens)):
                grown = branch
                if len(ids) - len(grown.tokens) <= NEAR:
                    return grown, None
        source = max(idle, key=lambda one: one.num_shared(ids), default=None)
        if source is not None and source.num_shared(ids) == 0:
            source = None
        if grown is not None and (source is None or len(grown.tokens) >= source.num_shared(ids)):
            return grown, None
        if len(self._all) < self._max_branches:
            self._all.append(Branch())
            return self._all[-1], source
        if not idle:
            return None
        oldest = idle[-1]
        return oldest, (None if oldest is source else source)

    def _touch(self, branch: Branch) -> None:
        self._uses += 1
        branch.is_busy, branch.used = True, self._uses

    def _release(self, *branches: Branch | None) -> None:
        with self._changed:
            for branch in branches:
                if branch is not None:
                    branch.is_busy = False
            self._changed.notify_all()

    def _drop(self, branch: Branch) -> None:
        with self._changed:
            if branch in self._all:
                self._all.remove(branch)
        branch.close()
