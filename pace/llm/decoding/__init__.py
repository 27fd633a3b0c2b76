"""Turns logits into tokens and tokens into text, and decides when the text ends."""
