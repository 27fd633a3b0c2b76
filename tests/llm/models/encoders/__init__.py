"""Encoders against transformers, and against themselves."""
