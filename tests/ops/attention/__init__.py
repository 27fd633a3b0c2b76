"""Attention beyond the causal form of a whole layer: newest positions, latents, wide values and slopes."""
