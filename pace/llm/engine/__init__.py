"""The engine: schedules sequences into steps and runs each step."""

from pace.llm.engine.engine import Engine

__all__ = ["Engine"]
