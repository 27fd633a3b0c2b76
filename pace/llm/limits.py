"""Limits and checks of the arguments that requests of all clients have, in Python and over HTTP."""

from __future__ import annotations

from typing import Any

MAX_PRIORITY = 100
"""Limit in both directions, so the number of sequences that can overtake another is bounded."""
MAX_SALT = 128
"""Maximum length of a cache salt, in characters."""


def checked_salt(cache_salt: Any) -> str | None:
    """Returns the salt. Raises TypeError or ValueError for an invalid one."""
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt must be a string or None, got {cache_salt!r:.100}")
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT:
        raise ValueError(f"cache_salt must have 1 to {MAX_SALT} characters, got {len(cache_salt)}")
    return cache_salt


def checked_priority(priority: Any) -> int:
    """Returns the priority. Raises TypeError or ValueError for an invalid one."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!r}")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(
            f"priority must be an int from {-MAX_PRIORITY} to {MAX_PRIORITY}, higher is earlier; got {priority}"
        )
    return priority
