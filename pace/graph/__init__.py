"""Graph compilation: a model's forward pass is recorded once (`recorded`), rewritten (`passes`), and run in C++ with
one call per step (`Program`)."""

from pace.graph.program import Program

__all__ = ["Program"]
