"""Reads quantised checkpoints without changing them: for each `quant_method` of config.json, which tensors make a
matrix, and how to interpret them.

A method is one file and one line in the registry. It finds the matrices of a checkpoint (`Method.matrices`). A matrix
(`StoredMatrix`) returns any of its rows as codes and scales, bit for bit those of the file."""

from pace.checkpoints.quantized.method import Method
from pace.checkpoints.quantized.registry import METHODS, read_quant_method
from pace.checkpoints.quantized.stored import StoredMatrix, StoredTensors

__all__ = ["METHODS", "Method", "StoredMatrix", "StoredTensors", "read_quant_method"]
