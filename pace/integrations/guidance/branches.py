"""The branches of programs that share a model: each keeps its tokens, with their keys and values, in a session.

guidance's loop gives all tokens of a branch each time that it wants logits. `Branches` finds the session that has most
of them. Many threads may ask at once, and their sessions then share the engine's steps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pace.llm.clients.session import Session

NEAR = 8
"""A branch that lacks this many tokens or fewer is taken without looking for a nearer one."""


class Advance(NamedTuple):
    """What came of bringing a branch to some tokens."""

    rows: Tensor
    """fp32 `[rows, V]`: logits of what follows the last tokens, in the caller's hands."""
    num_cached: int
    """How many of the tokens needed no work."""


class Branch:
    """One session, the tokens that it has, and the logits of what follows them."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.tokens: list[int] = []
        self.row: Tensor | None = None
        """`[1, V]`, of the last token; None where it is not known."""
        self.is_busy = True
        self.used = 0
        """Larger for a branch that was used later."""

    def begins(self, ids: list[int]) -> bool:
        """Whether all tokens of the branch are the first of `ids`."""
        length = len(self.tokens)
        return length <= len(ids) and self.tokens[-1:] == ids[length - 1 : length] and self.tokens == ids[:length]

    def num_shared(self, ids: list[int]) -> int:
        """How many tokens the branch and `ids` begin with alike."""
        least, most = 0, min(len(ids), len(self.tokens))
        while least < most:  # halves that are compared in C
            middle = (least + most + 1) // 2
            if ids[least:middle] == self.tokens[least:middle]:
                least = middle
            else:
                most = middle - 1
        return least

    def fork_of(self, other: Branch, ids: list[int]) -> None:
        """Becomes a branch with the tokens that `other` and `ids` begin with."""
        self.close()
        self.session, self.tokens, self.row = other.session.fork(), list(other.tokens), None
        self.cut(self.num_shared(ids))

    def close(self) -> None:
        """Frees the session."""
        if self.session is not None:
            self.session.close()

    def cut(self, num_tokens: int) -> None:
        """Forgets all but the first tokens."""
        if num_tokens < len(self.tokens):
            self.row = None
            self.session.truncate(num_tokens)
            del self.tokens[num_tokens:]

    def advance(self, ids: list[int], most_rows: int) -> Advance:
        """Goes to the tokens `ids`, at least one, and gives the logits of what follows the new ones: of the last
        `most_rows` at most. Before them stands the row of the last old token, where the branch only grows and there is
        room for it."""
        num_cached = self.num_shared(ids)
        if num_cached == len(ids) == len(self.tokens) and self.row is not None:
            return Advance(self.row.clone(), num_cached)
        self.cut(min(num_cached, len(ids) - 1))
        num_cached, before = len(self.tokens), self.row
        self.row = None
        new = ids[num_cached:]
        rows = self.session.append(new, min(len(new), most_rows))
        self.tokens, self.row = list(ids), rows[-1:].clone()  # a row that is drawn from is edited meanwhile
        if before is not None and len(new) < most_rows:
            rows = torch.cat([before, rows])
        return Advance(rows, num_cached)


class Branches:
    """Up to `most` branches. The least recently used makes room for a new one. Safe to use from several threads."""

    def __init__(self, new_session: Callable[[], Session], most: int) -> None:
        self._new_session = new_session
        self._most = most
        self._all: list[Branch] = []
        self._uses = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def advance(self, ids: list[int], most_rows: int) -> Advance:
        """As `Branch.advance`, of the branch that has most of `ids`. One that would lose tokens is forked, so that
        whoever goes on with it finds them. Waits while all branches are busy. Raises what `Session.append` does."""
        branch, source = self._claim(ids)
        try:
            if source is not None:
                branch.fork_of(source, ids)
            elif branch.session is None:
                branch.session = self._new_session()
            self._release(source)
            source = None
            return branch.advance(ids, most_rows)
        except BaseException:
            self._drop(branch)
            raise
        finally:
            self._release(source, branch)

    def close(self) -> None:
        """Frees the sessions; who computes meanwhile fails. Closing twice is harmless."""
        with self._changed:
            self._is_closed = True
            for branch in self._all:
                branch.close()
            self._all.clear()
            self._changed.notify_all()

    def _claim(self, ids: list[int]) -> tuple[Branch, Branch | None]:
        """A branch to bring to `ids`, and the one that it is to be a fork of first; both are busy from now on."""
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
        if len(self._all) < self._most:
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
