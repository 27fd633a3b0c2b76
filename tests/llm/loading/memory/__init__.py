"""Tests of the memory needed to open a model."""
