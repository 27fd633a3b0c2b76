"""Prepares images and sound for a model as its checkpoint says, and finds their places in a prompt."""
