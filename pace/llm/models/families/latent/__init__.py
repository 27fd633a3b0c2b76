"""Families with latent attention, one file each; `latent.py` has their common parts."""
