"""Processors of images, against those of transformers."""
