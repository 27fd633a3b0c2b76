"""Graph compilation: a model's forward pass recorded once (`recorded`), rewritten (`passes`), and run in C++, one call
per step (`Program`)."""

from pace.graph.program import Program

__all__ = ["Program"]
