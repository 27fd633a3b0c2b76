"""Measured and predicted speed of a model on this machine, compared with the machine's limits: `pace bench`, `pace
plan`."""
