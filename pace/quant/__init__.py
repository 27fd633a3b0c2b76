"""Weight formats: how rows of floats become codes and scales (`pace.ops.weight_layout`), and which matrix of a model
uses which format."""

from pace.quant.config import QuantizationConfig, read_quantization
from pace.quant.format import Format
from pace.quant.fp8 import FP8
from pace.quant.int4 import Int4
from pace.quant.int8 import Int8
from pace.quant.microscaling import MXFP4, MXFP8
from pace.quant.nf4 import FP4, NF4
from pace.quant.registry import FORMATS, read_format

__all__ = [
    "FORMATS",
    "FP4",
    "FP8",
    "Format",
    "Int4",
    "Int8",
    "MXFP4",
    "MXFP8",
    "NF4",
    "QuantizationConfig",
    "read_format",
    "read_quantization",
]
