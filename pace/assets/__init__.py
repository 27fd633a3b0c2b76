"""Paths of the models that come with the package. They are ordinary checkpoints.

    LLMModel(pace.assets.TINY)

`README.md` in this folder describes what they can do and how they were made.
"""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""A chat model of 4 million parameters (Llama architecture) that writes stories, counts, adds, and knows capitals."""

TINY_DRAFT = Path(__file__).parent / "tiny-draft"
"""A smaller model with the same tokenizer, to draft tokens for `TINY`."""
