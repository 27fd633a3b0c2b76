"""Turns tokens into text, and decides when the text ends."""
