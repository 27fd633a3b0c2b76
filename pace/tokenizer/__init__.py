"""A model's tokenizer: text to token ids and back, and conversations as text."""
