"""GGUF files as checkpoints: the container, its tensors under the Hub's names, its tokenizer."""
