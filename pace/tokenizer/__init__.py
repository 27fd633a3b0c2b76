"""Tokenizers of models: text to token ids and back, and conversations to text."""
