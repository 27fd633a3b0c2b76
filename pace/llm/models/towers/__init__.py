"""Towers: encoders of images and sound, one file for each family."""
