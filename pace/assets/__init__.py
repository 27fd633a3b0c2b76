"""Where the models that come with the package are: ordinary checkpoints, loaded by path like any other.

    LLMModel(pace.assets.TINY)

`README.md` beside this file says what they can do and how they were made.
"""

from pathlib import Path

TINY = Path(__file__).parent / "tiny"
"""A chat model of 4 million parameters (Llama architecture) that tells stories, counts, adds, and knows capitals."""

TINY_DRAFT = Path(__file__).parent / "tiny-draft"
"""A smaller model with the same tokenizer, to draft tokens for `TINY`."""
