"""Models that take images as tiles: Idefics3, SmolVLM and LFM2-VL."""
