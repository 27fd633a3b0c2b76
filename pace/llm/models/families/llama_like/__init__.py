"""Families whose layers differ from Llama's in a few options."""
