"""Encoders: models whose tokens see all others of their text. One file each."""
