"""Static quantisation: a checkpoint whose weights are rounded with a look at what the model does on a text."""

from pace.calibrate.method import METHODS
from pace.calibrate.quantize import quantize_checkpoint
from pace.calibrate.report import Quality, Report

__all__ = ["METHODS", "Quality", "Report", "quantize_checkpoint"]
