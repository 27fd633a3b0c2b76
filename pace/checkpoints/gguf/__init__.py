"""GGUF files, which stand for a directory: the container, its tensors under the Hub's names, its tokenizer."""
