"""How many threads an engine has in an actor: as many as Ray has set aside CPUs for it."""

from __future__ import annotations

import ray


def assigned_threads() -> int:
    """The `num_cpus` of the actor that calls. Raises ValueError where that is not a whole number, at least 1."""
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0)
    if cpus < 1 or cpus != int(cpus):
        raise ValueError(
            f"num_cpus must be a whole number, at least 1: it is the number of threads of the engine; got {cpus:g}"
        )
    return int(cpus)
