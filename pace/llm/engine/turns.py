"""Turns of several engines, which share the kernel threads of a process."""

from __future__ import annotations


class StepTurns:
    """A fair lock: who has waited longest is next. A driver holds it for one step of its engine.

    With several engines, each waits for at most one step of every other. An engine that steps alone never waits."""

    def __enter__(self) -> None:
        raise NotImplementedError

    def __exit__(self, *exception: object) -> None:
        raise NotImplementedError
