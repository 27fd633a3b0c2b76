"""The engine: which sequences get a place in a step, and the step itself."""

from pace.llm.engine.engine import Engine

__all__ = ["Engine"]
