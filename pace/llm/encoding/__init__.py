"""Whole texts to vectors and scores: the `Embedder` protocol, and its implementations."""
