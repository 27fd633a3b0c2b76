"""Checkpoints on disk: safetensors and PyTorch files, GGUF, and quantised checkpoints. This package does not depend on
any model."""
