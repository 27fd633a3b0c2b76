"""Limits the tokens that may come next: token masks of grammars, choices and healed prompts."""
