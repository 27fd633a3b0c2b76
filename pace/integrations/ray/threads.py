"""Number of threads of an engine in an actor."""

from __future__ import annotations

import ray


def assigned_threads() -> int:
    """Returns the `num_cpus` of the calling actor. Raises ValueError if it is not a whole number of at least 1."""
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if cpus < 1 or cpus != int(cpus):
        raise ValueError(
            f"num_cpus must be a whole number, at least 1: it is the number of threads of the engine; got {cpus:g}"
        )
    return int(cpus)
