"""Clients of the engine: requests, batches, sessions, beam search, streamers."""
