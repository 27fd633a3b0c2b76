"""Widely used models, from packages of the package index: `make real`."""
