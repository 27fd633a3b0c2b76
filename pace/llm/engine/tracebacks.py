"""Releases the engine's local variables from errors that outlive their step."""

from __future__ import annotations

from types import FrameType


def forget_engine_frames(error: BaseException | None) -> None:
    """Drops the local variables of pace's frames from an error's traceback, which prints as before.

    Otherwise a reference to the error (a notebook, `sys.last_exc`) would keep the engine, and the weights after
    `close`. Running frames are left alone."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            _clear(trace.tb_frame)
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def _clear(frame: FrameType | None) -> None:
    """Clears the frame and its callers."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("pace."):
            try:
                frame.clear()
            except RuntimeError:  # it runs, and so do its callers
                return
        frame = frame.f_back
