"""Checkpoints as they lie on disk: safetensors and PyTorch files, GGUF, and quantised ones. Nothing here knows a model."""
