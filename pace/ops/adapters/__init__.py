"""LoRA adapters of one product: their matrices by slot, and what they add in plain torch."""

from pace.ops.adapters.table import AdapterMatrices, AdapterPart, AdapterTable

__all__ = ["AdapterMatrices", "AdapterPart", "AdapterTable"]
