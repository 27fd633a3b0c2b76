"""Speculative decoding: where drafts come from, how many are worth a step, and what they have brought."""
