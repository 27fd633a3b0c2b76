"""Speculative decoding: draft sources, draft lengths, and statistics of both."""
