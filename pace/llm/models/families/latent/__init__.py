"""Families with latent attention, one file each; `latent.py` has what they share."""
