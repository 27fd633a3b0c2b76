"""Quantised checkpoints as they are: for each `quant_method` of config.json, which tensors make a matrix, and what they
mean.

A method is one file and one line in the registry. It finds the matrices of a checkpoint (`Method.matrices`); a matrix
(`StoredMatrix`) gives any of its rows as codes and scales, bit for bit those of the file.
"""

from pace.checkpoints.quantized.method import Method
from pace.checkpoints.quantized.registry import METHODS, read_quant_method
from pace.checkpoints.quantized.stored import StoredMatrix, TensorSource

__all__ = ["METHODS", "Method", "StoredMatrix", "TensorSource", "read_quant_method"]
