"""Families whose layers are Llama's but for a few switches."""
