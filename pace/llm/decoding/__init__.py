"""From logits to tokens, and from tokens to text and the end of it."""
