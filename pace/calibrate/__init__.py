"""Static quantisation: rounds a checkpoint's weights using statistics of the model's activations on a calibration
text."""

from pace.calibrate.method import METHODS
from pace.calibrate.quantize import quantize_checkpoint
from pace.calibrate.report import Quality, Report

__all__ = ["METHODS", "Quality", "Report", "quantize_checkpoint"]
