"""GGUF files of drafters."""
